"""The programs that are run on blocksparse: training, experiments, benchmarks, the command line."""
