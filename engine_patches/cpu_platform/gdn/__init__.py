"""Gated DeltaNet layers in plain torch: what SGLang has only as Triton kernels.

One module per kind of kernel, with SGLang's names, arguments and state layouts; ``hooks`` puts them
in place. Nothing of it is used where SGLang has an accelerator.
"""
