"""Production Triton kernels. Importing a module of this room needs Triton; nothing is compiled until a kernel runs."""
