"""torch's templates of flex attention beside tritoncp's kernels: compiled, counted, compared."""
