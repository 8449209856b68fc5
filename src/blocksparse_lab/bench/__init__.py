"""Benchmarks: cases, timing in alternation, peers and reports."""
