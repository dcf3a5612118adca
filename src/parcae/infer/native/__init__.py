"""A whole pass over a few tokens on a CPU in C++, compiled on first use by the local compiler."""
