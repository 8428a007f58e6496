"""Kernels in C++ for CPUs: passes over memory that PyTorch makes several of, or makes slowly.

The `.cpp` files are compiled into one library, once per machine. `build` says where its file is and
has it made by `compiling`; both load no torch. `library` loads the file and calls its functions
with tensors; `kernels/native.py` says which ops use it. Where there is no compiler the plain
kernels run, and the log says so once.
"""
