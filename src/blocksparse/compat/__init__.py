"""The interface of OpenAI's blocksparse (2017); its public names are in `blocksparse.matmul` and `blocksparse.nn`."""
