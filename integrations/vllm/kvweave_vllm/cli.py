"""The command `kvweave-vllm`."""

import argparse
import json
import shlex
from collections.abc import Sequence


def connector_config(**settings: object) -> dict[str, object]:
    """Return vLLM's `kv_transfer_config` for kvweave; `settings` are the arguments of `kvweave-vllm flags`."""
    return {
        "kv_connector": "KvweaveConnector",
        "kv_connector_module_path": "kvweave_vllm.connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }


def flags(**settings: object) -> list[str]:
    """Return the flags that add kvweave to `vllm serve`."""
    return [
        "--kv-transfer-config", json.dumps(connector_config(**settings)),
        "--worker-extension-cls", "kvweave_vllm.connector.Extension",
        "--middleware", "kvweave_vllm.middleware.RequestCheck",
        "--enable-prompt-tokens-details",
    ]  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser("kvweave-vllm", description="kvweave inside vLLM")
    commands = parser.add_subparsers(dest="command", required=True)
    printed = commands.add_parser("flags", help="print the flags for `vllm serve`")
    printed.add_argument("--store", help="folder of the chunk store; by default `vllm` in kvweave's home")
    printed.add_argument("--namespace", help="part of every key; the knowledge base's name for its chunks")
    printed.add_argument("--shared", help="address of a tier that machines share, redis://… or s3://…")
    printed.add_argument("--limit-bytes", type=int, help="cap on the store's files")
    printed.add_argument("--host-bytes", type=int, help="cap on copies of KV in memory")
    printed.add_argument(
        "--max-rows", type=int, help="the most rows that one step computes beside vLLM's own"
    )
    given = vars(parser.parse_args(arguments))
    del given["command"]
    print(shlex.join(flags(**{name: value for name, value in given.items() if value is not None})))
