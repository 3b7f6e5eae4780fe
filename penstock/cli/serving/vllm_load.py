"""vLLM's own load test, its `vllm bench serve`, as a program: `python -m penstock.cli.serving.vllm_load ARGUMENTS`.

vLLM's command does not start beside its CPU build. Left out: everything else about the test, which is vLLM's.
"""

from __future__ import annotations

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
