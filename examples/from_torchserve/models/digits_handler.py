import io

import numpy as np
import torch
from PIL import Image
from ts.torch_handler.base_handler import BaseHandler
from ts.utils.util import PredictionException, map_class_to_label


class DigitsHandler(BaseHandler):
    """A handler that returns the most probable digits of a small image, with their probabilities."""

    def preprocess(self, data):
        rows = []
        for row in data:
            content = row.get("data") or row.get("body")
            try:
                image = Image.open(io.BytesIO(content)).convert("L").resize((8, 8), Image.Resampling.BOX)
            except (OSError, TypeError) as error:
                raise PredictionException("this is no image", 415) from error
            ink = np.asarray(image, dtype=np.float32).reshape(64) * (16 / 255)
            rows.append(torch.from_numpy(16 - ink if ink.mean() > 8 else ink))
        return torch.stack(rows)

    def postprocess(self, data):
        probabilities, classes = torch.topk(
            torch.softmax(data, 1), self.model_yaml_config["handler"]["best"], dim=1
        )
        return map_class_to_label(probabilities.tolist(), self.mapping, classes.tolist())
