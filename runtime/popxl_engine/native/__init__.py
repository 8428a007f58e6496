"""Kernels in C++ for CPUs: passes over memory that PyTorch makes several of, or makes slowly.

The `.cpp` files are compiled into two libraries, once per machine: one of float32 and of what has
no one type, which a program starts to make early, and one of bfloat16, for programs that have such
tensors. `memory/`, the allocator of tensors, becomes a third one, with PyTorch's headers. `build`
makes and finds them, in a checkout, an editable install and a wheel, which brings the kernels
compiled: `wheel` has setuptools ask for that. `library` loads the kernels and calls their functions
with tensors; `kernels/native.py` says which ops use them. `machine/allocator.py` loads the
allocator. Where there is no compiler the plain kernels run, and the log says so once.
"""
