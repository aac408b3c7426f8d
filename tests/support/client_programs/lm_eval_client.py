"""Tasks of lm-eval against the model ``chat`` at the argument's address (test_current_clients.py).

One compares the log-probabilities of choices, one generates a text; their data are local.
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

import lm_eval
import yaml
from lm_eval.tasks import TaskManager

ROWS = [{"question": f"Is {i} odd?", "choices": ["yes", "no"], "label": (i + 1) % 2} for i in range(6)]

with tempfile.TemporaryDirectory() as temporary:
    folder = Path(temporary)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
    }
    choice = {
        "task": "choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
    }
    text = {
        "task": "text",
        "output_type": "generate_until",
        "doc_to_target": "yes",
        "generation_kwargs": {"until": ["?"], "max_gen_toks": 8},
    }
    for task in (choice, text):
        (folder / f"{task['task']}.yaml").write_text(yaml.safe_dump({**data, **task}))
    common = {"model": "chat", "num_concurrent": 2, "max_retries": 1}
    served = {"base_url": f"{sys.argv[1]}/v1/completions", "tokenizer": sys.argv[2], "max_length": 256}
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={**common, **served, "batch_size": 4, "tokenizer_backend": "huggingface"},
        tasks=["choice", "text"],
        task_manager=TaskManager(include_path=temporary, include_defaults=False),
        bootstrap_iters=0,
    )
assert 0 <= results["results"]["choice"]["acc,none"] <= 1
logprobs = [answer for sample in results["samples"]["choice"] for answer in sample["filtered_resps"]]
assert len(logprobs) == 12 and all(value < 0 for value, _ in logprobs), logprobs
assert len(results["samples"]["text"]) == 6
answers = {
    sample["doc"]["question"]: [value for value, _ in sample["filtered_resps"]]
    for sample in results["samples"]["choice"]
}
print(json.dumps(answers))
print("every call was answered")
