# The compiled CPU core (csrc/module.cpp).
from typing import Any

def share_threads(parallel_for: int, get_num_threads: int) -> None: ...
def isas() -> list[tuple[str, bool]]: ...
def features() -> list[str]: ...
def linear(**arguments: Any) -> None: ...
def linear_wgrad(**arguments: Any) -> None: ...
def csr_working_bytes(isa: str, dtype: str, tokens: int, in_features: int) -> int: ...
def csr_wgrad_working_bytes(isa: str, dtype: str, tokens: int, out_features: int, in_features: int) -> int: ...
def csr_linear(**arguments: Any) -> None: ...
def csr_wgrad(**arguments: Any) -> None: ...
def csr_transposed(**arguments: Any) -> None: ...
def conv(**arguments: Any) -> None: ...
def conv_wgrad(**arguments: Any) -> None: ...

_Rows = tuple[int, int]  # the address of row 0, or 0, and the distance between rows

def gates_forward(
    isa: str,
    dtype: str,
    rows: int,
    hidden: int,
    z: _Rows,
    add: _Rows,
    gain: int,
    c: _Rows,
    h: _Rows,
    c_out: _Rows,
    gates: _Rows,
    /,
) -> None: ...
def gates_backward(
    isa: str,
    dtype: str,
    rows: int,
    hidden: int,
    gates: _Rows,
    c_before: _Rows,
    c: _Rows,
    grad_h: _Rows,
    grad_y: _Rows,
    grad_c: _Rows,
    grad_pre: _Rows,
    grad_c_before: _Rows,
    /,
) -> None: ...
