"""Layers for a few tokens at a time on a CPU, in C++: built once by the machine's own compiler."""
