"""Models and tokenizers: what is loaded, and what is refused with a remedy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from families import (
    SHAPE,
    VOCAB,
    backend,
    engine,
    generated,
    model_of,
    prompt,
    requests,
    tokens_of,
    torch,
    transformers,
)

from entropic_control import load
from entropic_control.backends import TritonConfig
from entropic_control.backends.paged.loading import check_tokenizer, converted, located
from entropic_control.config import load_config
from entropic_control.errors import CapabilityError, ConfigError, ModelError

SMALL = {"slots": 2, "context": 256, "device": "cpu", "kernels": "reference"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "llama"
    model_of("llama").save_pretrained(path)
    return path


def words(size: int, **special: str) -> Any:
    """A tokenizer of `size` words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{n}": n for n in range(size - 1)} | {"<end>": size - 1}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<end>", unk_token="w0", **special
    )


def test_a_directory_runs_by_configuration(saved: Path) -> None:
    config = {
        "backend": {"kind": "triton", "model": str(saved), **SMALL},
        "temperature": {"kind": "fixed", "temperature": 0.0},
        "pruning": "none",
    }
    with load(config) as run:
        assert run.backend.capabilities.vocab == VOCAB
        found = tokens_of(run.run(requests(prompt(30), tokens=8)))
    assert found == [generated(model_of("llama"), prompt(30), 8)]


def test_text_needs_a_tokenizer_and_token_ids_do_not(saved: Path) -> None:
    with load({"backend": {"kind": "triton", "model": str(saved), **SMALL}}) as run:
        report = run.run(["Hello"])
        assert (
            "no tokenizer: give token ids, or set backend.tokenizer" in report.completions[0].error
        )


def test_text_end_tokens_and_pieces_come_from_the_tokenizer() -> None:
    on = backend(tokenizer=words(100))
    assert on.encode("w5 w7").tolist() == [5, 7]
    assert on.ends.tolist() == [99]
    assert on.is_end(99)
    assert not on.is_end(5)
    assert on.piece(5) == b"w5"
    assert on.piece(99) == b""
    assert on.piece(400) == b""  # beyond the tokenizer, within the model
    with pytest.raises(ModelError, match="no chat template"):
        on.encode([{"role": "user", "content": "w5"}])


def test_a_tokenizer_of_another_model_is_refused(saved: Path, tmp_path: Path) -> None:
    words(VOCAB + 3).save_pretrained(tmp_path / "other")
    config = TritonConfig(model=str(saved), tokenizer=str(tmp_path / "other"), **SMALL)
    with pytest.raises(ModelError, match=r"tokenizer has 515 tokens and the model 512"):
        config.open()
    check_tokenizer(model_of("llama"), words(VOCAB))
    with pytest.raises(ModelError, match="there is no tokenizer at"):
        TritonConfig(model=str(saved), tokenizer=str(saved), **SMALL).open()


def test_a_model_without_a_head_is_refused(tmp_path: Path) -> None:
    model_of("llama").model.save_pretrained(tmp_path)  # the base model: hidden states only
    with pytest.raises(ModelError, match="has no language-modelling head"):
        TritonConfig(model=str(tmp_path), **SMALL).open()


def test_lost_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    (tmp_path / "config.json").write_bytes((saved / "config.json").read_bytes())
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights: model.layers.1.mlp.up_proj.weight"):
        TritonConfig(model=str(tmp_path), **SMALL).open()


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("/nowhere/at/all", "no model at"),
        ("hf://owner", "not of the form hf://owner/repo"),
        ("hf://nobody/nothing-there", "could not load model"),
    ],
)
def test_missing_models_say_where_to_look(name: str, fault: str) -> None:
    with pytest.raises(ModelError, match=fault):
        TritonConfig(model=name, **SMALL).open()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"holds no config.json"):
        located(str(tmp_path))


def test_a_file_that_is_no_gguf_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENTROPIC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text.gguf").write_bytes(b"hello world")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        located(str(tmp_path / "text.gguf"))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match="could not read"):
        converted(tmp_path / "damaged.gguf")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_context_beyond_the_trained_one_is_refused() -> None:
    with pytest.raises(ModelError, match="more than the 1024 tokens"):
        backend(context=2048)


@pytest.mark.parametrize("missing", ["torch", "transformers"])
def test_case_24_a_missing_package_is_named(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from entropic_control.backends import triton

    found = triton.find_spec
    monkeypatch.setattr(triton, "find_spec", lambda name: None if name == missing else found(name))
    with pytest.raises(
        CapabilityError, match=rf"needs {missing}: pip install 'entropic-control\[gpu\]'"
    ):
        load({}, backend="triton")


def test_case_24_describing_the_backend_loads_nothing_heavy() -> None:
    import os
    import subprocess

    code = (
        "import sys; from entropic_control.config import load_config;"
        "load_config({}, backend='triton'); print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert not {"torch", "transformers", "triton"} & {n.split(".")[0] for n in done.stdout.split()}


def test_wrong_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"backend.device"):
        load_config({"backend": {"kind": "triton", "device": "gpu"}})


def of(**changes: Any) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SHAPE, **changes})).eval()


def test_unsupported_models_are_refused_when_they_are_opened() -> None:
    """An unsupported head size, soft-capped scores, a model without keys and values."""
    with pytest.raises(CapabilityError, match="head size 272 is not supported: at most 256"):
        backend(of(head_dim=272), attention="kernels")
    gemma2 = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SHAPE)).eval()
    with pytest.raises(CapabilityError, match="soft-capped scores are not supported"):
        backend(gemma2)
    mamba = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1)
    ).eval()
    with pytest.raises(CapabilityError, match="MambaForCausalLM"):
        backend(mamba)


def test_odd_but_sound_shapes_run() -> None:
    """A head size that is no power of two, as many KV heads as heads, a single KV head."""
    for changes in ({"head_dim": 24}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1}):
        model = of(**changes)
        model.generation_config.eos_token_id = None
        for attention in ("gathered", "kernels"):
            found = tokens_of(engine(backend(model, attention=attention)).run(requests(prompt(40))))
            assert found == [generated(model, prompt(40), 12)]
