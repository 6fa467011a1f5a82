"""llama.cpp's server in this process, with `--cache-reuse`: `python -m kvweave_lab.bench.serving.llama_server --model FILE …`.

Needs the extra `llama`, whose binding has the same server as the program `llama-server`. It serves until it is killed.
"""

import argparse
import signal
from pathlib import Path

from kvweave.errors import MissingExtra, ModelNotFound


def serve(args: argparse.Namespace) -> None:
    """Start the server and wait until the process is killed. Raises MissingExtra, ModelNotFound."""
    try:
        import xllamacpp
    except ImportError as error:
        raise MissingExtra(
            "llama-server needs llama.cpp's binding; pip install 'kvweave-lab[llama]'"
        ) from error
    if not args.model.is_file():
        raise ModelNotFound(f"there is no file {args.model}; --gguf takes the path of a GGUF file")
    params = xllamacpp.CommonParams()
    params.model.path, params.port = str(args.model), args.port
    params.n_parallel, params.n_ctx = args.parallel, args.parallel * args.context_tokens
    params.n_cache_reuse = args.cache_reuse
    params.swa_full = True  # without it, llama.cpp switches reuse off for models with sliding windows
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = args.threads
    params.verbosity = 0
    server = xllamacpp.Server(params)  # held until the end: dropping it stops serving
    print(server.listening_address, flush=True)
    signal.pause()


def main() -> None:
    """Read the arguments and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True, help="requests at a time")
    parser.add_argument("--context-tokens", type=int, required=True, help="of each of them")
    parser.add_argument("--cache-reuse", type=int, required=True, help="fewest tokens of a moved match")
    parser.add_argument("--threads", type=int, required=True)
    serve(parser.parse_args())


if __name__ == "__main__":
    main()
