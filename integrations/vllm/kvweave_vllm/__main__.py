"""`python -m kvweave_vllm` is the command `kvweave-vllm`."""

from kvweave_vllm.cli import main

main()
