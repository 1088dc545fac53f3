import json
import os
import sys
import warnings

import pytest
import torch

from h5feed.cli.train import main
from h5feed.errors import H5FeedError, UsageError
from h5feed.train import export, load_trained, train
from train.helpers import error_on_full_disk, make_config, make_data, make_images

torch.set_num_threads(1)


def with_biases(num_outputs):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1),
        torch.nn.BatchNorm2d(8),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, num_outputs),
    )


@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_the_loaded_network_scores_what_the_run_scored(tmp_path, ema, channels_last):
    options = {"model": f"{__name__}:with_biases", "ema": ema, "channels_last": channels_last}
    options["drop_biases"] = True  # which is known when it is loaded
    config = make_config(tmp_path, epochs=1, **options)
    summary = train(config, make_data(config))
    net = load_trained(tmp_path / "best.pt")
    assert not net.training
    assert net.model[0].bias is None
    images, labels = make_images()
    with torch.no_grad():
        outputs = net(images)
    loss = torch.nn.functional.cross_entropy(outputs, labels).item()
    assert loss == pytest.approx(summary.val["loss"], rel=1e-5)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with averaged weights and dropped biases, on 8 px."""
    out = tmp_path_factory.mktemp("run")
    config = make_config(out, model=f"{__name__}:with_biases", epochs=1, ema=0.5, drop_biases=True)
    train(config, make_data(config))
    return out / "best.pt"


def expected(trained, images):
    with torch.no_grad():
        return load_trained(trained)(images)


def test_a_plain_state_dict_fits_the_model_and_takes_normalized_images(trained, tmp_path):
    exported = export(trained, tmp_path / "weights.pt")
    model = with_biases(4)
    model[0].register_parameter("bias", None)
    model.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    images = make_images()[0]
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (exported.mean, exported.std))
    with torch.no_grad():
        found = model.eval()((images - mean) / std)
    torch.testing.assert_close(found, expected(trained, images))
    assert exported.input == (
        "RGB images (batch, 3, 8, 8) as (pixels - mean) / std, with pixels from 0 to 255, mean "
        "100.00, 100.00, 100.00 and std 50.00, 50.00, 50.00"
    )


@pytest.mark.parametrize("count", [1, 5])
def test_an_exported_program_gives_the_same_outputs(trained, tmp_path, count):
    exported = export(trained, tmp_path / "model.pt2")
    extra = {"h5feed.txt": ""}
    program = torch.export.load(tmp_path / "model.pt2", extra_files=extra).module()
    images = make_images()[0][:count].contiguous()
    torch.testing.assert_close(program(images), expected(trained, images))
    takes = "uint8 RGB images, (batch, 3, 8, 8); it normalizes them itself"
    assert exported.input == extra["h5feed.txt"] == takes


def test_onnx_gives_the_same_outputs(trained, tmp_path):
    onnx = pytest.importorskip("onnx")
    evaluator = pytest.importorskip("onnx.reference")
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # torch's, which are none of the user's
        assert main(["export", str(trained), "--to", str(path)]) == 0
    onnx.checker.check_model(onnx.load(path), full_check=True)
    for count in (1, 5):
        images = make_images()[0][:count].contiguous()
        (found,) = evaluator.ReferenceEvaluator(str(path)).run(None, {"images": images.numpy()})
        torch.testing.assert_close(
            torch.from_numpy(found), expected(trained, images), rtol=1e-4, atol=1e-4
        )
    properties = {entry.key: entry.value for entry in onnx.load(path).metadata_props}
    assert properties["input"].startswith("uint8 RGB images, (batch, 3, 8, 8)")


def test_the_command_says_what_the_file_takes(trained, tmp_path, capsys):
    to = tmp_path / "weights.pt"
    assert main(["export", str(trained), "--to", str(to)]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"{to}: ")
    assert ":with_biases, 4 outputs; takes RGB images (batch, 3, 8, 8) as (pixels - mean)" in said
    assert main(["export", str(trained), "--to", str(to), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["size"], result["mean"]) == (8, [100.0] * 3)


def test_what_cannot_be_exported_is_one_sentence(trained, tmp_path, monkeypatch, capsys):
    with pytest.raises(UsageError, match=r"^--to .*model\.tflite has an ending that nothing is kn"):
        export(trained, tmp_path / "model.tflite")
    with pytest.raises(UsageError, match=r"^the checkpoint .*gone\.pt does not exist: name a run'"):
        export(tmp_path / "gone.pt", tmp_path / "w.pt")
    with pytest.raises(UsageError, match=r"^--size 9 does nothing for a state_dict: leave it out"):
        export(trained, tmp_path / "w.pt", size=9)
    with pytest.raises(UsageError, match=r"^--to .* is the checkpoint itself: name another file$"):
        export(trained, trained)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert main(["export", str(trained), "--to", str(tmp_path / "m.onnx")]) == 1
    assert capsys.readouterr().err == (
        "train-h5 export: onnxscript is not installed, and this needs it: "
        'pip install "h5feed[onnx]"\n'
    )
    # 8 px were trained on, and the last layer fits no other size.
    with pytest.raises(
        H5FeedError, match=r"could not be exported to .*: torch cannot trace .*--to weights\.pt wri"
    ):
        export(trained, tmp_path / "m.pt2", size=32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("name", ["w.pt", "m.pt2"])
def test_a_full_disk_is_one_sentence_and_leaves_nothing(trained, tmp_path, name):
    """As far as a process is concerned: its files may have no more bytes than that."""
    path = tmp_path / name
    assert error_on_full_disk(1000, lambda: export(trained, path)) == (
        f"H5FeedError: --to {path} could not be written: File too large. Make room, or name "
        "another file"
    )
    assert list(tmp_path.iterdir()) == []
