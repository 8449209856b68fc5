"""Programs that run on blocksparse: training, experiments, benchmarks, the command line."""
