"""Production Triton kernels. All but `rope_arguments` need Triton when imported; nothing is compiled until a kernel runs."""
