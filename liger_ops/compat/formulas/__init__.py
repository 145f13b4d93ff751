"""The package's functions that no operator computes, as differentiable formulas of torch.

Formulas compute in fp32 or wider and round once, to the dtype of their first argument. Shapes and strides are free.
"""
