"""python tests/fuzz --help"""

import importlib.util
import os
import sys
from pathlib import Path

CORE = os.environ.get("BLOCKSPARSE_FUZZ_CORE")
if CORE:  # use another build of the core, before anything imports the installed one
    spec = importlib.util.spec_from_file_location("blocksparse._core", CORE)
    sys.modules["blocksparse._core"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["blocksparse._core"])

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.run import main  # noqa: E402

sys.exit(main())
