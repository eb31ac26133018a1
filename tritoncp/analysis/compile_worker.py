"""A compiler process: reads a job a line from stdin and answers in a line on stdout, both JSON.

``python -m tritoncp.analysis.compile_worker`` starts one, without TRITON_INTERPRET: Triton compiles in it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

from tritoncp.analysis.jobs import Job
from tritoncp.analysis.kernel_digest import hash_launch
from tritoncp.analysis.kernel_report import report_kernel
from tritoncp.analysis.launches import launch_of
from tritoncp.ops.engine_factory import name_functions

# Of a job as a dict.
QUESTIONS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "report": lambda raw: report_kernel(Job.of(raw)),
    "digest": lambda raw: {"digest": hash_launch(launch_of(Job.of(raw)))},
}


def main() -> None:
    """Answer jobs until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of compilers goes to stderr
    name_functions()
    for line in sys.stdin:
        try:
            question, job = json.loads(line)
            answer = QUESTIONS[question](job)
        except Exception as error:  # any error of a compiler is an answer: other jobs go on
            answer = {"failed": f"{type(error).__name__}: {str(error).strip()[:500]}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
