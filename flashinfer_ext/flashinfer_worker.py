"""Compile one module: ``python -m flashinfer_ext.flashinfer_worker KIND HEAD_DIM DTYPE``.

A process of its own, because FlashInfer reads its environment (architectures, cache folder, CUDA
home) once, on import. ``flashinfer_build`` sets it and starts this. The last line printed is the
path of the shared library.
"""

from __future__ import annotations

import sys

from flashinfer_ext.flashinfer_source import DTYPES, ModuleSpec


def jit_spec(spec: ModuleSpec):
    """FlashInfer's build specification. Side effect: writes the generated sources to its cache."""
    import torch
    from flashinfer.jit.attention import modules

    dtype = getattr(torch, DTYPES[spec.dtype])
    name, source = spec.variant
    shared = (
        spec.name, dtype, dtype, dtype, torch.int32, spec.head_dim, spec.head_dim,
        list(spec.tensors), list(spec.tensors.values()),
        list(spec.scalars), list(spec.scalars.values()), name, source,
    )  # fmt: skip
    if spec.kind == "decode":
        return modules.gen_customize_batch_decode_module(*shared)
    # "equal": the arena's K and V views differ in their base address only. It halves the kernels.
    return modules.gen_customize_batch_prefill_module(
        "fa2", *shared, paged_kv_stride_mode="equal", module_surface="full"
    )


def main(argv: list[str]) -> int:
    """Build ``argv`` = kind, head dim, dtype. Errors of the compiler propagate."""
    kind, head_dim, dtype = argv
    built = jit_spec(ModuleSpec(kind, int(head_dim), dtype))
    built.build(verbose=False)
    print(built.get_library_path())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
