"""Triton's interpreter, made faster."""

from __future__ import annotations

import inspect
from typing import Any


def patch_language_once() -> None:
    """Let a kernel patch Triton's language once, not again for each call of a device function.

    Triton stacks these patches on each other, which takes more time than the kernel itself.
    """
    from triton.runtime import interpreter

    patch, run = interpreter._patch_lang, interpreter.GridExecutor.__call__
    if patch.__module__ == __name__ or not hasattr(interpreter, "_LangPatchScope"):  # as in Triton 3.6 and newer
        return
    patched: set[Any] = set()

    def patch_new(fn: Any) -> Any:
        languages = {each for each in fn.__globals__.values() if inspect.ismodule(each)}
        languages &= {interpreter.tl, interpreter.tl.core}
        if languages <= patched:
            return interpreter._LangPatchScope()
        patched.update(languages)
        return patch(fn)

    def run_patched(self: Any, *args: Any, **options: Any) -> Any:
        patched.clear()
        try:
            return run(self, *args, **options)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_new, run_patched
