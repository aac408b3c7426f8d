import torch
from torchrelay import BaseHandler, PredictionException

RATE = 16_000  # samples per second
WINDOW = 512  # new samples per step of the network, behind CONTEXT earlier ones
CONTEXT = 64
START_THRESHOLD, END_THRESHOLD = 0.5, 0.35  # probabilities of speech
PAUSE = 4  # consecutive windows below END_THRESHOLD that end a turn


class SequenceState:
    """The state of a sequence: the network's memory, unprocessed samples, and whether speech is active."""

    def __init__(self):
        self.memory = torch.zeros(2, 128)
        self.samples = torch.zeros(CONTEXT)
        self.windows = 0
        self.is_speaking = False
        self.silent_windows = 0

    def update(self, probability):
        """Return the change of a window: (began or ended, seconds from the start), or None."""
        self.windows += 1
        self.silent_windows = self.silent_windows + 1 if probability < END_THRESHOLD else 0
        if not self.is_speaking and probability >= START_THRESHOLD:
            self.is_speaking = True
            return "began", (self.windows - 1) * WINDOW / RATE
        if self.is_speaking and self.silent_windows == PAUSE:
            self.is_speaking = False
            return "ended", (self.windows - PAUSE) * WINDOW / RATE
        return None


class VoiceActivity(BaseHandler):
    """A handler whose rows are chunks of recordings of any length: 16-bit mono samples, 16,000 per second."""

    def initialize(self, context):
        super().initialize(context)
        self.states = {}

    def preprocess(self, data):
        return self._map_rows(data, self.decode_samples)

    def inference(self, data):
        """Run the next windows of all rows as one batch until no row has a complete one."""
        sequence_ids = [self.context.get_sequence_id(row) for row in range(len(data))]
        states = [self.states.setdefault(id, SequenceState()) for id in sequence_ids]
        for state, samples in zip(states, data):
            state.samples = torch.cat([state.samples, samples])
        answers = [{"speech": [], "began": [], "ended": []} for _ in data]
        while ready := [row for row, state in enumerate(states) if len(state.samples) >= CONTEXT + WINDOW]:
            probabilities, memories = self.step(
                torch.stack([states[row].samples[: CONTEXT + WINDOW] for row in ready]),
                torch.stack([states[row].memory for row in ready], dim=1),
            )
            for index, row in enumerate(ready):
                state, probability = states[row], round(float(probabilities[index]), 4)
                state.memory, state.samples = memories[:, index], state.samples[WINDOW:]
                answers[row]["speech"].append(probability)
                if change := state.update(probability):
                    answers[row][change[0]].append(change[1])
        return answers

    def postprocess(self, data):
        return data

    def sequence_ended(self, sequence_id, why):
        self.states.pop(sequence_id, None)

    def step(self, windows, memories):
        """Return speech probabilities ``[rows]`` and memories ``[2, rows, 128]`` of ``[rows, 576]``."""
        with torch.inference_mode():
            if isinstance(self.model, torch.jit.ScriptModule):
                # The submodule for 16,000 samples per second.
                probabilities, memories = self.model._model(windows, memories)
            else:
                output = self.model(input=windows, state=memories, sr=torch.tensor(RATE))
                probabilities, memories = output["output"], output["stateN"]
        return probabilities[:, 0], memories

    def decode_samples(self, row):
        content = row.get("data") or row.get("body") or b""
        if not isinstance(content, (bytes, bytearray)) or len(content) % 2:
            raise PredictionException(
                "send 16-bit samples as bytes (application/octet-stream), two bytes each", 400
            )
        if not content:
            return torch.zeros(0)
        return torch.frombuffer(bytearray(content), dtype=torch.int16) / 32768
