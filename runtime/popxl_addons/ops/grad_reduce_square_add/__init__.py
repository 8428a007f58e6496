"""What one gradient adds to the square of the global norm."""

from popxl_addons.ops.grad_reduce_square_add.grad_reduce_square_add import grad_reduce_square_add
