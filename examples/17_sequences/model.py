import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence


class Reader(nn.Module):
    """Reads text letter by letter and has one vector of memory, however much it has read."""

    letters, size = 128, 128

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(self.letters, 32)
        self.gru = nn.GRU(32, self.size, batch_first=True)
        self.next = nn.Linear(self.size, self.letters)

    def forward(self, text: Tensor) -> Tensor:
        """The scores of the letter after each one of ``text`` (n, length)."""
        return self.next(self.gru(self.embed(text))[0])

    def read(self, texts: list[Tensor], memories: Tensor) -> Tensor:
        """The memories (n, size) of n readers, each after its own text, whatever its length: one batch for all."""
        padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        lengths = torch.tensor([len(text) for text in texts])
        packed = pack_padded_sequence(self.embed(padded), lengths, batch_first=True, enforce_sorted=False)
        return self.gru(packed, memories[None])[1][0]

    def go_on(self, memories: Tensor, length: int) -> list[str]:
        """What each reader expects to follow. What it remembers stays as it was."""
        found = []
        for _ in range(length):
            letter = self.next(memories).argmax(1)
            found.append(letter)
            memories = self.gru(self.embed(letter[:, None]), memories[None])[1][0]
        return [bytes(row).decode("ascii") for row in torch.stack(found, 1).tolist()]
