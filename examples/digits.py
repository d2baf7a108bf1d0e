"""A training loop of your own under any strategy: handwritten digits, with offbeat.join().

offbeat run --learners 4 --sync k-sync:3 digits.py
offbeat run --learners 4 --sync ring digits.py
python digits.py
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import offbeat
from offbeat.datasets import digits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()

    learner = offbeat.join()
    torch.manual_seed(given.seed)
    data = digits()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    ).to(given.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=given.lr, momentum=0.9)
    samples = TensorDataset(torch.from_numpy(data.images), torch.from_numpy(data.digits))
    loader = DataLoader(samples, batch_size=given.batch_size, shuffle=True)
    model, optimizer, loader = learner.prepare(model, optimizer, loader)

    loss_of = nn.CrossEntropyLoss()
    cancelled = 0
    for _ in range(given.epochs):
        for images, shown in loader:
            with learner.minibatch() as minibatch:
                optimizer.zero_grad()
                loss = loss_of(model(images.to(given.device)), shown.to(given.device))
                minibatch.loss = loss.detach()
                loss.backward()
                optimizer.step()  # pushes, waits as the policy says, fetches
            cancelled += minibatch.cancelled

    learner.finish()  # all are done: the model has the last weights
    if learner.number == 0:
        model.eval()
        with torch.no_grad():
            guesses = model(torch.from_numpy(data.test_images).to(given.device)).argmax(1).cpu()
        right = guesses == torch.from_numpy(data.test_digits)
        print(f"accuracy {100 * right.float().mean():.1f} % after {learner.version} updates")


if __name__ == "__main__":
    main()
