"""Several vLLM replicas with kvweave behind vllm-router, on one machine.

    pip install vllm-router
    python replicas.py Qwen/Qwen2.5-1.5B-Instruct --store /var/lib/kvweave --max-model-len 8192

Flags that are not listed below are for every replica. All of them use one store, so that a chunk that one has prepared is there for all. On
several machines give `--shared redis://host:6379/0` instead, and start a replica on each. Ask at http://127.0.0.1:8000/v1, as
README.md says, which also says when the policies `consistent_hash` and `sticky_least_loaded` are of use: they route by the key that
`kvweave_vllm.request` sends. Ctrl-C ends all.
"""

import argparse
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence

from kvweave_vllm.cli import flags

POLL_S = 1.0


def replica_command(model: str, port: int, store: dict[str, str], more: Sequence[str]) -> list[str]:
    """Return what starts a replica: `vllm serve`, by the module that it runs."""
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
    return [*server, "--model", model, "--port", str(port), *flags(**store), *more]


def router_command(port: int, replicas: Sequence[str], policy: str) -> list[str]:
    """Return what starts the router."""
    listen = ["--host", "127.0.0.1", "--port", str(port)]
    return [
        sys.executable,
        "-m",
        "vllm_router.launch_router",
        *listen,
        "--policy",
        policy,
        "--worker-urls",
        *replicas,
    ]


def wait_until_healthy(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Return when a replica answers; raise SystemExit if it ends before."""
    while True:
        if process.poll() is not None:
            raise SystemExit(
                f"the replica at {url} ended with status {process.returncode}; see what it wrote above"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Start the replicas, then the router, and end all with the first that ends."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000, help="of the router; replicas have the next ones")
    parser.add_argument("--policy", default="power_of_two", help="of vllm-router")
    parser.add_argument("--store", help="folder of the chunk store; by default in kvweave's home")
    parser.add_argument("--shared", help="address of a tier that machines share, redis://… or s3://…")
    parser.add_argument("--dry-run", action="store_true", help="print the commands alone")
    args, more = parser.parse_known_args(arguments)
    store = {name: value for name in ("store", "shared") if (value := getattr(args, name)) is not None}
    ports = range(args.port + 1, args.port + 1 + args.replicas)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    commands = [replica_command(args.model, port, store, more) for port in ports]
    commands.append(router_command(args.port, urls, args.policy))
    if args.dry_run:
        print("\n".join(map(shlex.join, commands)))
        return
    processes: list[subprocess.Popen[bytes]] = []
    try:
        processes += [subprocess.Popen(command) for command in commands[:-1]]
        for url, process in zip(urls, processes, strict=True):
            wait_until_healthy(url, process)
        processes.append(subprocess.Popen(commands[-1]))
        while all(process.poll() is None for process in processes):
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait()


if __name__ == "__main__":
    main()
