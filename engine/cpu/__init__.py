"""The compiled CPU path: kernels, the team of threads that runs them, and the recording of a step.

The only package that imports numba, and only to compile kernels that are in no cache.
`docs/decisions/0007-compiled-steps-on-the-cpu.md` says why it exists.
"""
