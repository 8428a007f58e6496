"""Kernels in C++ for CPUs: passes over memory that PyTorch makes several of, or makes slowly.

The `.cpp` files are compiled into one library, once per machine, and `memory/`, the allocator of
tensors, into another one, with PyTorch's headers. `build` makes and finds them, in a checkout, an
editable install and a wheel, which brings the kernels compiled: `wheel` has setuptools ask for
that. `library` loads the kernels and calls its functions with tensors; `kernels/native.py` says
which ops use it. `machine/allocator.py` loads the allocator. Where there is no compiler the plain
kernels run, and the log says so once.
"""
