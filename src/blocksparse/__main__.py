"""`python -m blocksparse`: the command line of `blocksparse_lab`, which is part of the same distribution."""

from blocksparse_lab.__main__ import main

if __name__ == "__main__":
    main()
