"""Hostile models: configurations, weights, tokenizers, GGUF files and chat templates."""

import json
import logging
import struct
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from math import prod
from pathlib import Path
from random import Random
from typing import Any, Final

from kvweave.models.loading import load_any_model, load_without_weights
from kvweave.models.prompt import PromptTemplate
from kvweave.models.source import gguf_folder
from kvweave.testing import tiny_model, tiny_tokenizer
from kvweave.types import Message, Prompt
from kvweave_lab.fuzz.campaign import Files, Reader
from kvweave_lab.fuzz.mutations import OUTSIDE, mutated, mutated_json

_FAMILIES: Final = ("llama", "qwen2-sliding", "gemma3", "phi3-longrope")
_OUTSIDE_LINK: Final = Path("../outside")
_TEMPLATE: Final = (
    "{% for message in messages %}{{ '<bos>' if loop.first }}{{ message['role'] }}: {{ message['content'] | trim }}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@cache
def _folder(family: str) -> Mapping[str, bytes]:
    """Return the files of a tiny model with its tokenizer."""
    settings: dict[str, Any] = {"num_hidden_layers": 1}
    if family == "qwen2-sliding":
        settings["max_window_layers"] = 0
    if family == "gemma3":
        settings["layer_types"] = ["full_attention"]
    with tempfile.TemporaryDirectory() as place:
        tiny_model(family, **settings).save_pretrained(place)
        tiny_tokenizer(_TEMPLATE).save_pretrained(place)
        return {path.name: path.read_bytes() for path in Path(place).iterdir()}


def _quiet() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _load(folder: Path) -> None:
    _quiet()
    load_any_model(str(folder), home=folder / "home", device="cpu")


def _changed(rng: Random, files: Mapping[str, bytes], name: str) -> bytes:
    return mutated_json(rng, json.loads(files[name])) if rng.random() < 0.9 else mutated(rng, files[name])


def _config(rng: Random) -> Files:
    files: dict[str, bytes | Path] = dict(_folder(rng.choice(_FAMILIES)))
    own = {name: data for name, data in files.items() if isinstance(data, bytes)}
    way = rng.random()
    if way < 0.85:
        files["config.json"] = _changed(rng, own, "config.json")
    elif way < 0.95:
        files["generation_config.json"] = _changed(rng, own, "generation_config.json")
    else:
        files[rng.choice(list(files))] = _OUTSIDE_LINK
    return files


def _weights(rng: Random) -> Files:
    """Draw a change of the header of model.safetensors, of its list of tensors, or the list of several files."""
    files: dict[str, bytes | Path] = dict(_folder(rng.choice(_FAMILIES)))
    data = files["model.safetensors"]
    assert isinstance(data, bytes)
    (length,) = struct.unpack_from("<Q", data)
    header, body = data[8 : 8 + length], data[8 + length :]
    way = rng.random()
    if way < 0.3:
        files["model.safetensors"] = _other_tensors(rng, json.loads(header), body)
    elif way < 0.5:
        new = mutated_json(rng, json.loads(header))
        files["model.safetensors"] = struct.pack("<Q", len(new)) + new + body
    elif way < 0.75:
        files["model.safetensors"] = mutated(rng, data[: 8 + length]) + body
    elif way < 0.8:
        files["model.safetensors"] = (
            struct.pack("<Q", rng.choice((0, 2**62, 2**64 - 1, length + 1))) + header + body
        )
    elif way < 0.9:
        name = rng.choice((*OUTSIDE, "model.safetensors", "config.json", "other.safetensors"))
        index = {"metadata": {}, "weight_map": dict.fromkeys(json.loads(header), name)}
        del files["model.safetensors"]
        files["other.safetensors"] = data
        files["model.safetensors.index.json"] = mutated_json(rng, index)
    else:  # PyTorch's format, which is a pickle
        del files["model.safetensors"]
        files["pytorch_model.bin"] = mutated(
            rng, _pickle(rng), (b"cos\nsystem\n", b"cposix\nsystem\n", b"tR.")
        )
    return files


def _other_tensors(rng: Random, header: dict[str, Any], body: bytes) -> bytes:
    """Return a safetensors file that keeps to the format: with other numbers, or a tensor more, less, renamed or of another type."""
    name, change = rng.choice([key for key in header if key != "__metadata__"]), rng.randrange(6)
    own = header[name]
    start, end = own["data_offsets"]
    if change == 0:  # numbers, often not finite
        wrong = struct.pack("<f", rng.choice((float("nan"), float("inf"), -1e38, 0.0)))
        body = body[:start] + wrong * ((end - start) // 4) + body[end:]
    elif change == 1:
        body = body[:start] + rng.randbytes(end - start) + body[end:]
    elif change == 2:
        header["model.layers.7.self_attn.q_proj.weight"] = own | {
            "data_offsets": [len(body), len(body) + end - start]
        }
        body += body[start:end]
    elif change == 3:
        header[rng.choice((*OUTSIDE, f"{name}.old", "lm_head.weight"))] = header.pop(name)
    elif change == 4:
        header[name] = own | {"dtype": rng.choice(("I32", "U32", "F64", "BOOL", "F8_E4M3"))}
    else:
        header[name] = own | {"shape": own["shape"][::-1] if rng.random() < 0.5 else [prod(own["shape"])]}
    new = json.dumps(header).encode()
    return struct.pack("<Q", len(new)) + new + body


@cache
def _torch_file() -> bytes:
    import io

    import torch

    buffer = io.BytesIO()
    torch.save(dict(tiny_model("llama", num_hidden_layers=1).state_dict()), buffer)
    return buffer.getvalue()


def _pickle(rng: Random) -> bytes:
    """Return weights in PyTorch's format, or a pickle that would run a command."""
    return _torch_file() if rng.random() < 0.7 else b"cos\nsystem\n(S'touch /outside'\ntR."


# Tokenizers


def _tokenizer(rng: Random) -> Files:
    files: dict[str, bytes | Path] = dict(_folder("llama"))
    own = {name: data for name, data in files.items() if isinstance(data, bytes)}
    name = "tokenizer.json" if rng.random() < 0.7 else "tokenizer_config.json"
    files[name] = _changed(rng, own, name)
    if rng.random() < 0.03:
        files[rng.choice(("tokenizer.json", "chat_template.jinja"))] = _OUTSIDE_LINK
    return files


def _tokenize(folder: Path) -> None:
    _quiet()
    found = load_without_weights(str(folder), folder / "home")
    template = PromptTemplate(found.tokenizer)
    template.render(Prompt("When does the harbour open?", ("It opens <eos> at six.",)))
    template.chunk_offsets("It opens at six.")


# GGUF

_STRING, _ARRAY = 8, 9
_U32, _F32, _BOOL, _U64 = 4, 6, 7, 10


@cache
def _gguf_parts() -> tuple[tuple[tuple[str, int, Any], ...], tuple[tuple[str, tuple[int, ...], bytes], ...]]:
    """Return metadata (name, type, value) and tensors (name, shape, bytes) of a tiny Llama in float32."""
    import gguf

    model = tiny_model("llama", num_hidden_layers=1)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    tensors = tuple(
        (
            str(names.get_name(name, try_suffixes=(".weight",))),
            tuple(each.shape),
            each.detach().numpy().tobytes(),
        )
        for name, each in model.state_dict().items()
    )
    core = json.loads(tiny_tokenizer().backend_tokenizer.to_str())["model"]
    pieces = sorted(core["vocab"], key=core["vocab"].get)
    pieces += [f"[PAD{number}]" for number in range(len(pieces), model.config.vocab_size)]
    numbers = {
        "context_length": 512,
        "embedding_length": 32,
        "block_count": 1,
        "feed_forward_length": 48,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
    }
    return (
        ("general.architecture", _STRING, "llama"),
        *((f"llama.{name}", _U32, value) for name, value in numbers.items()),
        ("llama.attention.layer_norm_rms_epsilon", _F32, 1e-6),
        ("tokenizer.ggml.model", _STRING, "gpt2"),
        ("tokenizer.ggml.pre", _STRING, "gpt-2"),
        ("tokenizer.ggml.tokens", _ARRAY, pieces),
        ("tokenizer.ggml.token_type", _ARRAY, [3] * 3 + [1] * (len(pieces) - 3)),
        ("tokenizer.ggml.merges", _ARRAY, [" ".join(pair) for pair in core["merges"]]),
        ("tokenizer.ggml.bos_token_id", _U32, 1),
        ("tokenizer.ggml.eos_token_id", _U32, 2),
        ("tokenizer.chat_template", _STRING, _TEMPLATE),
    ), tensors


def _string(text: str) -> bytes:
    data = text.encode("utf-8", "replace")
    return struct.pack("<Q", len(data)) + data


def _value(kind: int, value: Any) -> bytes:
    if kind == _ARRAY:
        element = _STRING if value and isinstance(value[0], str) else _U32
        return struct.pack("<IQ", element, len(value)) + b"".join(_value(element, each) for each in value)
    if kind == _STRING:
        return _string(str(value))
    form = {_U32: "<I", _F32: "<f", _BOOL: "<?", _U64: "<Q", 5: "<i", 12: "<d"}[kind]
    return struct.pack(form, value)


_ODD_VALUES: Final[tuple[tuple[int, Any], ...]] = (
    *((_U32, each) for each in (0, 1, 3, 7, 2**16, 2**31, 2**32 - 1)),
    *((_U64, each) for each in (0, 2**40, 2**63, 2**64 - 1)),
    *((5, each) for each in (-1, -(2**31))),
    *((_F32, each) for each in (0.0, -1.0, float("nan"), float("inf"))),
    *((12, each) for each in (1e308, float("nan"))),
    *(
        (_STRING, each)
        for each in ("", "x", "llama", "gemma3", "phi3", "yarn", "a" * 1000, "{{ 1 // 0 }}", *OUTSIDE)
    ),
    *((_ARRAY, each) for each in ([], [0], [1, 2], ["a"], [2**31] * 3)),
    (_BOOL, True),
)
_ODD_KEYS: Final = (
    *(
        "general.alignment",
        "general.type",
        "split.count",
        "split.tensors.count",
        "llama.expert_count",
        "llama.vocab_size",
    ),
    *(
        "llama.rope.scaling.type",
        "llama.rope.scaling.factor",
        "llama.rope.scale_linear",
        "llama.rope.dimension_count",
    ),
    *(
        "llama.rope.freq_base",
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.attention.causal",
    ),
    *("tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token"),
    *(
        "tokenizer.ggml.eot_token_id",
        "tokenizer.ggml.scores",
        "llama.rope.scaling.original_context_length",
        "",
    ),
)


def _gguf_file(rng: Random, *, changed: bool) -> bytes:
    metadata, tensors = list(_gguf_parts()[0]), list(_gguf_parts()[1])
    shapes = {name: tuple(reversed(shape)) for name, shape, _ in tensors}
    kinds = dict.fromkeys(shapes, 0)
    offsets, at = {}, 0
    for name, _, data in tensors:
        offsets[name], at = at, at + -(-len(data) // 32) * 32
    for _ in range(rng.choice((1, 1, 2)) if changed else 0):
        way, entry = rng.random(), rng.randrange(len(metadata))
        name = rng.choice(list(shapes))
        if way < 0.4:
            metadata[entry] = (metadata[entry][0], *rng.choice(_ODD_VALUES))
        elif way < 0.6:
            metadata.append((rng.choice(_ODD_KEYS), *rng.choice(_ODD_VALUES)))
        elif way < 0.65:
            del metadata[entry]
        elif way < 0.75:
            odd = (0, 1, 2, 2**32, 2**62, 2**64 - 1)
            shapes[name] = tuple(rng.choice(odd) for _ in range(rng.choice((0, 1, 2, 4, 5, 20_000))))
        elif way < 0.8:
            kinds[name] = rng.choice((1, 2, 8, 12, 14, 30, 31, 99, 2**31))
        elif way < 0.85:
            offsets[name] = rng.choice((1, 2**32, 2**63, 2**64 - 1, -offsets[name] % 2**64))
        elif way < 0.9:
            tensors.append((rng.choice(("rope_freqs.weight", "blk.9.attn_q.weight", "x")), (4,), b"\0" * 16))
            shapes[tensors[-1][0]], kinds[tensors[-1][0]], offsets[tensors[-1][0]] = (4,), 0, 0
        else:
            nested = struct.pack("<IQ", _ARRAY, 1) * rng.choice((10, 3_000, 100_000)) + struct.pack(
                "<IQ", _U32, 0
            )
            metadata.append(("nested", -_ARRAY, nested))
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for name, kind, value in metadata:
        header += _string(name) + struct.pack("<I", abs(kind)) + (value if kind < 0 else _value(kind, value))
    for name, _, _ in tensors:
        header += _string(name) + struct.pack(f"<I{len(shapes[name])}Q", len(shapes[name]), *shapes[name])
        header += struct.pack("<IQ", kinds[name], offsets[name])
    padded = header + b"\0" * (-len(header) % 32)
    return padded + b"".join(data + b"\0" * (-len(data) % 32) for _, _, data in tensors)


@cache
def _gguf_header_bytes() -> int:
    _, tensors = _gguf_parts()
    whole = len(_gguf_file(Random(0), changed=False))
    return whole - sum(-(-4 * prod(shape) // 32) * 32 for _, shape, _ in tensors)


def _gguf(rng: Random) -> Files:
    if rng.random() < 0.6:
        return {"model.gguf": _gguf_file(rng, changed=True)}
    data, header = _gguf_file(rng, changed=False), _gguf_header_bytes()
    words = (
        struct.pack("<IQ", _ARRAY, 2**63),
        struct.pack("<Q", 2**64 - 1),
        b"\x09\0\0\0",
        b"llama.block_count",
    )
    return {"model.gguf": mutated(rng, data[:header], words) + data[header:]}


def _convert(folder: Path) -> None:
    _quiet()
    gguf_folder(str(folder / "model.gguf"), folder / "home")


# Chat templates

_TEMPLATE_WORDS: Final = (
    *(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os }}",
    ),
    *(
        "{{ self._TemplateReference__context }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ lipsum.__globals__['os'].popen('id') }}",
    ),
    *(
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__ }}",
        "{{ joiner.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
    ),
    *(
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{{ ('{0.__class__}' | attr('format'))('') }}",
    ),
    *(
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{% import '../outside' as x %}",
        "{{ 1 // 0 }}",
    ),
    *(
        "{% set ns = namespace(a='') %}",
        "{% set ns.a = ns.a ~ message.content %}",
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
    ),
    *(
        "{{ raise_exception('no') }}",
        "{{ messages[99] }}",
        "{{ undefined.a }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{% break %}",
    ),
    *(
        "{% if message['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}",
        "{{ message['content'] | tojson }}",
        "<bos>",
    ),
    *(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{{ range(10 ** 9) }}",
        "{{ '%999999999d' % 1 }}",
    ),
    *(
        "{{ 'a' * 10 ** 10 }}",
        "{{ 9 ** 9 ** 9 }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ lipsum(n=10 ** 6) }}",
        "{% endfor %}",
        "{{",
        "%}",
    ),
    *(
        "{% macro m(x) %}{% if x %}{{ m(x - 1) }}{{ m(x - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{{ strftime_now('%d') }}",
    ),
    *(
        "{% set ns = namespace(a='aa') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "<think>",
        "\x02message 0.0\x03",
    ),
)
_TEMPLATES: Final = (
    _TEMPLATE,
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}{% set messages = messages[1:] %}"
    "{% endif %}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('order') }}"
    "{% endif %}[INST] {{ system if loop.first }}{{ message['content'] }} [/INST]{% endfor %}",
    "{% macro turn(m) %}<|{{ m.role }}|>\n{{ m.content.split('</think>')[-1].lstrip() }}{% endmacro %}{% for m in messages %}"
    "{{ turn(m) }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}",
)


def _template(rng: Random) -> Files:
    words, others = [each.encode() for each in _TEMPLATE_WORDS], [each.encode() for each in _TEMPLATES]
    return {"chat_template.jinja": mutated(rng, rng.choice(others), words, others)}


_tokenizer_for_templates = cache(tiny_tokenizer)


def _render(folder: Path) -> None:
    _quiet()
    tokenizer = _tokenizer_for_templates()
    tokenizer.chat_template = (folder / "chat_template.jinja").read_bytes().decode("utf-8", "replace")
    template = PromptTemplate(tokenizer)
    _ = template.end_tokens
    prompt = Prompt(
        "When?", ("It opens <eos> at six.",), earlier=(Message("user", "Hi"), Message("assistant", "Yes?"))
    )
    template.render(prompt)
    template.render_turn(Prompt("And when does it close?", ()))
    template.render_chat([Message("system", "Be brief."), Message("user", "When? <eos>")])


MODELS: Final[Mapping[str, Reader]] = {
    "config": Reader(_config, _load),
    "weights": Reader(_weights, _load),
    "tokenizer": Reader(_tokenizer, _tokenize),
    "gguf": Reader(_gguf, _convert),
    "template": Reader(_template, _render),
}
