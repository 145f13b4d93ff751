"""What tests share.

calls           how to call every operator: ROWS. kernel_calls: what kernels do beyond them. operator_calls: one call of
                every public and private operator. strategies: random calls. wrong_calls: calls that must be refused.
rows            tests over ROWS, and layouts of their tensors (layouts)
checks          properties of any function, accuracy, processes; pairs: grids
families/       what the test files of a family of operators share: inputs, and the comparison with formulas
oracles/        formulas that do not come from the library
models/         language models of a few layers, adapters, and what patched models must do
host/           Triton's interpreter, a driver without a GPU, forked processes, programs and process groups, the C++ example
"""
