"""How good samples are, over any iterator of images."""

from collections.abc import Iterable

import numpy as np

from dit.config import UsageError
from dit.sampling import SampleBatch


def class_accuracy(batches: Iterable[SampleBatch], images: np.ndarray, labels: np.ndarray,
                   neighbours: int = 3) -> float:
    """Share of samples in which a nearest-neighbour classifier, fitted on real images, finds the class asked for.

    ``images`` (M, ...) are real images with the samples' range, 0 to 255, and ``labels`` (M,) their classes. The metric
    is the Euclidean distance of pixels, so this says something about small, centred images like digits only.
    """
    from sklearn.neighbors import KNeighborsClassifier

    classifier = KNeighborsClassifier(neighbours).fit(images.reshape(len(images), -1), labels)
    right = total = 0
    for batch in batches:
        found = classifier.predict(batch.images.numpy().reshape(len(batch.images), -1))
        right += int((found == np.asarray(batch.classes)).sum())
        total += len(found)
    if not total:
        raise UsageError("no samples to evaluate")
    return right / total
