"""What training a block-sparse net on many devices takes: bytes on each, bytes between them, seconds a step.

`net` says what is trained, `hardware` on what, `formulas` how bytes and seconds follow, `plan` what each engine makes
of them; `measure` finds the rates of this machine, and `reality` what a real step of real processes takes.
"""
