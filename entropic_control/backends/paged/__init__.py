"""A transformers model over a paged KV cache: the parts of the `triton` backend, one idea a file.

===========  ================================================================================
`pool`       which blocks of the cache belong to whom: reference counts, copy-on-write, tables
`storage`    the keys and values themselves, by layer
`step`       what one forward needs to know about its rows, as tensors on the device
`attention`  transformers' attention and cache interfaces, on our kernels
`loading`    models and tokenizers from a directory, hf://, or a GGUF file
`text`       prompts to token ids, token ids to bytes
`runner`     the model run on the chunks of a step
`graphs`     the decode step as a captured CUDA graph
`drawing`    measuring, temperature update and sampling where the logits live
===========  ================================================================================

Importing `pool` needs numpy only; the others need torch, and `attention` and `loading` transformers.
"""
