"""Triton kernels, each beside its plain torch reference; importing this package needs neither.

One file a kernel, its launcher under the file's own name:

=================  =================================================================
`entropy`          entropy, varentropy and normaliser of rows of logits
`top_k`            entropy bounds from the k most probable tokens
`control_sample`   the same measurement, the PI temperature update and the next token
`truncation`       top-k, top-p, min-p and surprisal limits, as an option of the last
`paged_attention`  decode attention over retained blocks, with the blocks' masses
`paged_prefill`    causal attention of chunks over retained blocks
`kv_cache`         writing keys and values, copying and compacting blocks
=================  =================================================================

Each launcher takes `mode`: "auto" (the compiled kernel on CUDA tensors, Triton's interpreter where
TRITON_INTERPRET=1 was set before triton was imported, else plain torch) or one of "compiled",
"interpreter" and "reference", which fails with a `CapabilityError` where it cannot be had.
``python -m entropic_control.bench.gpu_check`` checks and times them on a GPU,
``python -m entropic_control.kernels.aot`` compiles them without one.
"""
