"""A whole pass over a few tokens on a CPU in C++, compiled on first use by the local compiler.

network    the pass, as a network of `parcae.infer.network`
kernels    compiles, loads and calls the library
choice     whether it is faster than PyTorch here: measured once and cached
"""
