import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


class Reader(nn.Module):
    """A recurrent network that reads text letter by letter into a state of constant size."""

    letters, size = 128, 128

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.letters, 32)
        self.gru = nn.GRU(32, self.size, batch_first=True)
        self.next = nn.Linear(self.size, self.letters)

    def forward(self, text: Tensor) -> Tensor:
        """Return the scores of the next letter at each position of ``text`` (n, length)."""
        return self.next(self.gru(self.embed(text))[0])

    def read(self, texts: list[Tensor], states: Tensor) -> Tensor:
        """Return the states (n, size) after n texts of any lengths, which run as one batch."""
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        packed = pack_padded_sequence(self.embed(padded), lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed, states[None])[1][0]

    def generate(self, states: Tensor, length: int) -> list[str]:
        """Return the predicted continuation of each state, which does not change."""
        letters = []
        for _ in range(length):
            letter = self.next(states).argmax(1)
            letters.append(letter)
            states = self.gru(self.embed(letter[:, None]), states[None])[1][0]
        return [bytes(row).decode("ascii") for row in torch.stack(letters, 1).tolist()]
