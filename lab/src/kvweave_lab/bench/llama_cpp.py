"""llama.cpp on the same prompts and threads, for the comparison of `kvweave bench weights`. Needs the extra `llama`.

`python -m kvweave_lab.bench.llama_cpp SOURCE.gguf TARGET.gguf [TYPE]` writes a file's weights again as Q8_0 (8 bits, the default),
F16 or F32, where a model is at hand in another format only.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidRequest, MissingExtra, ModelNotFound
from kvweave_lab.bench.measurement import resident_bytes


class LlamaCpp:
    """A loaded GGUF file. `resident_bytes` is what loading added, with the KV cache of `tokens`."""

    def __init__(self, path: Path, tokens: int, threads: int) -> None:
        try:
            import xllamacpp
        except ImportError as error:
            raise MissingExtra(
                "--gguf needs llama.cpp's binding; pip install 'kvweave-lab[llama]'"
            ) from error
        if not path.is_file():
            raise ModelNotFound(f"there is no file {path}; --gguf takes the path of a GGUF file")
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel, params.verbosity = tokens, 1, 0
        params.cache_prompt, params.warmup = False, True
        for threads_of in (params.cpuparams, params.cpuparams_batch):
            threads_of.n_threads, threads_of.poll = (
                threads,
                0,
            )  # idle threads would spin beside what is measured next
        params.port = 0
        before = resident_bytes()
        try:
            self._server = xllamacpp.Server(params)
        except RuntimeError as error:
            raise ModelNotFound(f"llama.cpp cannot load {path}: {error}") from error
        self.resident_bytes = resident_bytes() - before

    def times(self, prompt: Sequence[int], new_tokens: int) -> tuple[float, float]:
        """Return the seconds of a prefill, and the seconds per decoded token, as llama.cpp counts them."""
        request = {
            "prompt": list(prompt),
            "n_predict": new_tokens,
            "temperature": 0,
            "cache_prompt": False,
            "ignore_eos": True,
        }
        answer: Any = self._server.handle_completions(request)
        answer = json.loads(answer) if isinstance(answer, str) else answer
        if "timings" not in answer:
            raise InvalidRequest(f"llama.cpp did not run the prompt: {json.dumps(answer)[:200]}")
        timings = answer["timings"]
        return timings["prompt_ms"] / 1000, timings["predicted_per_token_ms"] / 1000


FILE_TYPES = {"Q8_0": "MOSTLY_Q8_0", "F16": "MOSTLY_F16", "F32": "ALL_F32"}
"""Types that `write_as` writes, and how GGUF names a file of them."""


def write_as(source: Path, target: Path, kind_name: str = "Q8_0") -> None:
    """Write a GGUF file's matrices as a type of FILE_TYPES, vectors in 32 bits; the rest of the file stays.

    Raises InvalidRequest for another type and for a file that holds no model.
    """
    import gguf

    if kind_name not in FILE_TYPES:
        raise InvalidRequest(
            f"weights cannot be written as {kind_name!r}; choose from {', '.join(FILE_TYPES)}"
        )
    wanted = gguf.GGMLQuantizationType[kind_name]

    reader = gguf.GGUFReader(str(source))
    architecture = reader.get_field("general.architecture")
    if architecture is None:
        raise InvalidRequest(f"{source} names no architecture, so it holds no model")
    writer = gguf.GGUFWriter(str(target), architecture.contents())
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind_name]])
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        matrix = numbers.ndim > 1 and numbers.shape[-1] % 32 == 0
        kind = wanted if matrix else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write_as(Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:4])
