import torch

from handlers.base import BaseHandler
from handlers.errors import PredictionException

RATE = 16_000  # samples a second
WINDOW = 512  # samples that the network hears at a time, behind the last CONTEXT before them
CONTEXT = 64
BEGINS, ENDS = 0.5, 0.35  # probabilities of speech
PAUSE = 4  # windows below ENDS that end what somebody says


class Voice:
    """What is kept of one sequence: the network's memory, the samples that no window has had, and who is speaking."""

    def __init__(self):
        self.memory = torch.zeros(2, 128)
        self.samples = torch.zeros(CONTEXT)
        self.windows = 0
        self.speaks = False
        self.quiet = 0

    def hear(self, probability):
        """The turn that this window brings: (began or ended, seconds from the start), or None."""
        self.windows += 1
        self.quiet = self.quiet + 1 if probability < ENDS else 0
        if not self.speaks and probability >= BEGINS:
            self.speaks = True
            return "began", (self.windows - 1) * WINDOW / RATE
        if self.speaks and self.quiet == PAUSE:
            self.speaks = False
            return "ended", (self.windows - PAUSE) * WINDOW / RATE
        return None


class VoiceActivity(BaseHandler):
    """Each row is a piece of a recording, of any length: 16-bit samples, 16,000 a second, one channel."""

    def initialize(self, context):
        super().initialize(context)
        self.voices = {}

    def preprocess(self, data):
        return self._each(data, self.samples)

    def inference(self, data):
        """Windows of all rows go through the network together, as long as there are any."""
        names = [self.context.get_sequence_id(row) for row in range(len(data))]
        voices = [self.voices.setdefault(name, Voice()) for name in names]
        for voice, samples in zip(voices, data):
            voice.samples = torch.cat([voice.samples, samples])
        answers = [{"speech": [], "began": [], "ended": []} for _ in data]
        while ready := [row for row, voice in enumerate(voices) if len(voice.samples) >= CONTEXT + WINDOW]:
            probabilities, memories = self.step(
                torch.stack([voices[row].samples[: CONTEXT + WINDOW] for row in ready]),
                torch.stack([voices[row].memory for row in ready], dim=1),
            )
            for place, row in enumerate(ready):
                voice, probability = voices[row], round(float(probabilities[place]), 4)
                voice.memory, voice.samples = memories[:, place], voice.samples[WINDOW:]
                answers[row]["speech"].append(probability)
                if turn := voice.hear(probability):
                    answers[row][turn[0]].append(turn[1])
        return answers

    def postprocess(self, data):
        return data

    def sequence_ended(self, sequence_id, why):
        self.voices.pop(sequence_id, None)

    def step(self, windows, memories):
        """Probabilities of speech ``[rows]`` and memories ``[2, rows, 128]``, of windows ``[rows, 576]``."""
        with torch.inference_mode():
            if isinstance(self.model, torch.jit.ScriptModule):
                probabilities, memories = self.model._model(windows, memories)  # the part that is for 16,000 a second
            else:
                said = self.model(input=windows, state=memories, sr=torch.tensor(RATE))
                probabilities, memories = said["output"], said["stateN"]
        return probabilities[:, 0], memories

    def samples(self, row):
        content = row.get("data") or row.get("body") or b""
        if not isinstance(content, (bytes, bytearray)) or len(content) % 2:
            raise PredictionException("send 16-bit samples as bytes (application/octet-stream), two bytes each", 400)
        if not content:
            return torch.zeros(0)
        return torch.frombuffer(bytearray(content), dtype=torch.int16) / 32768
