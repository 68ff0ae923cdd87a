import numpy as np
import pytest
import torch
from reference import GOLDEN, TIMESTEPS, cosine_input, relative_error

from dit.config import UsageError
from dit.diffusion import create_diffusion, discretized_gaussian_log_likelihood, linear_betas, space_timesteps

SHAPE, LOOP_SHAPE = (4, 4, 8, 8), (2, 4, 8, 8)
T = torch.tensor(TIMESTEPS)
X_START, NOISE = cosine_input(SHAPE), cosine_input(SHAPE, 1.0, 0.7)


def network(x, t):
    """The network of the reference numbers: predicted noise, then the variance's interpolation."""
    t = 1e-4 * t.view(-1, 1, 1, 1)
    return torch.cat([0.3 * x + t, 0.2 * torch.sin(x) + t], dim=1)


def fixed_network(x, t):
    return 0.3 * x + 1e-4 * t.view(-1, 1, 1, 1)


def formula_noise(call, x):
    return cosine_input(tuple(x.shape), 2.0 + call, 0.9)


@pytest.fixture(scope="module")
def golden():
    return np.load(GOLDEN)


# ---- the official numbers ----

@pytest.mark.parametrize("table", ["betas", "alphas_cumprod", "posterior_variance", "posterior_log_variance_clipped",
                                   "posterior_mean_coef1", "posterior_mean_coef2"])
def test_schedule_tables(golden, table):
    actual = getattr(create_diffusion(), table)
    assert actual.dtype == np.float64
    np.testing.assert_allclose(actual, golden[f"diffusion/{table}"], rtol=1e-11)


def test_q_sample(golden):
    assert relative_error(create_diffusion().q_sample(X_START, T, NOISE), golden["diffusion/q_sample"]) < 1e-5


@pytest.mark.parametrize(("learn_sigma", "model", "prefix", "terms"), [
    (True, network, "loss", {"loss", "mse", "vb"}), (False, fixed_network, "fixed_loss", {"loss", "mse"})])
def test_training_losses(golden, learn_sigma, model, prefix, terms):
    losses = create_diffusion(learn_sigma=learn_sigma).training_losses(model, X_START, T, noise=NOISE)
    assert losses.keys() == terms
    for term, loss in losses.items():
        assert loss.shape == (4,)
        np.testing.assert_allclose(loss, golden[f"diffusion/{prefix}_{term}"], rtol=1e-5)


def test_p_mean_variance(golden):
    out = create_diffusion().p_mean_variance(network, X_START, T, clip_denoised=False)
    assert out.keys() == {"mean", "variance", "log_variance", "pred_xstart"}
    for name, value in out.items():
        assert relative_error(value, golden[f"diffusion/pmv_{name}"]) < 1e-5, name
    clipped = create_diffusion().p_mean_variance(network, X_START, T)
    assert relative_error(clipped["mean"], golden["diffusion/pmv_clip_mean"]) < 1e-5
    assert clipped["pred_xstart"].abs().max() == 1


@pytest.mark.parametrize("spec", ["10", "ddim10", "250"])
@pytest.mark.parametrize("kind", ["p_loop", "ddim_loop_eta0", "ddim_loop_eta1"])
def test_sampling_loops(golden, spec, kind):
    diffusion = create_diffusion(spec)
    options = dict(noise=cosine_input(LOOP_SHAPE, 1.0, 0.7), clip_denoised=False, noise_fn=formula_noise)
    if kind == "p_loop":
        sample, key = diffusion.p_sample_loop(network, LOOP_SHAPE, **options), f"p_loop_{spec}"
    else:
        eta = int(kind[-1])
        sample, key = diffusion.ddim_sample_loop(network, LOOP_SHAPE, eta=eta, **options), f"ddim_loop_{spec}_eta{eta}"
    assert relative_error(sample, golden[f"diffusion/{key}"]) < 1e-5


@pytest.mark.parametrize("spec", ["10", "250", "1000", "ddim10", "ddim25", "ddim50", "ddim100", "10,15,20", "5,5,5,5"])
def test_respacing_keeps_the_official_steps(golden, spec):
    assert space_timesteps(1000, spec) == golden[f"respace/{spec}"].tolist()


# ---- respacing ----

@pytest.mark.parametrize("spec", ["", None])
def test_no_respacing_keeps_every_step(spec):
    assert space_timesteps(1000, spec) == list(range(1000))


def test_other_ways_to_write_a_respacing():
    assert space_timesteps(1000, 250) == space_timesteps(1000, [250]) == space_timesteps(1000, "250")
    assert space_timesteps(1000, [10, 15, 20]) == space_timesteps(1000, "10, 15, 20")
    assert space_timesteps(1000, "1") == [0]


@pytest.mark.parametrize(("spec", "message"), [
    ("1001", "timestep_respacing '1001': 1001 steps are asked of section 1, which has 1000"),
    ("10,400,10", "timestep_respacing '10,400,10': 400 steps are asked of section 2, which has 333"),
    ("0", "timestep_respacing '0': must be like '250', '10,15,20' or 'ddim50'"),
    ("-5", "timestep_respacing '-5': must be like '250', '10,15,20' or 'ddim50'"),
    ("fast", "timestep_respacing 'fast': must be like '250', '10,15,20' or 'ddim50'"),
    ("10,,20", "timestep_respacing '10,,20': must be like '250', '10,15,20' or 'ddim50'"),
    ([], "timestep_respacing []: must be like '250', '10,15,20' or 'ddim50'"),
    ("ddim", "timestep_respacing 'ddim': 'ddim' is followed by a number from 1 to 1000"),
    ("ddim0", "timestep_respacing 'ddim0': 'ddim' is followed by a number from 1 to 1000"),
    ("ddim1001", "timestep_respacing 'ddim1001': 'ddim' is followed by a number from 1 to 1000"),
    ("ddim300", "timestep_respacing 'ddim300': no integer stride gives 300 of 1000 steps; '300' spreads them unevenly"),
])
def test_impossible_respacings_are_refused_in_one_line(spec, message):
    with pytest.raises(UsageError) as error:
        create_diffusion(spec)
    assert str(error.value) == message


def test_the_model_sees_the_full_schedules_timesteps():
    seen = []

    def model(x, t):
        seen.append(t.tolist())
        return network(x, t)

    create_diffusion("10,15,20").p_sample_loop(model, LOOP_SHAPE)
    assert seen == [[step, step] for step in reversed(space_timesteps(1000, "10,15,20"))]


def test_respacing_keeps_the_signal_of_the_kept_steps():
    full, spaced = create_diffusion(), create_diffusion().respaced("10")
    assert (spaced.num_timesteps, spaced.variance) == (10, full.variance)
    np.testing.assert_allclose(spaced.alphas_cumprod, full.alphas_cumprod[spaced.timestep_map], rtol=1e-12)
    np.testing.assert_array_equal(spaced.respaced("").betas, full.betas)


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_a_single_step_gives_finite_samples(learn_sigma):
    diffusion = create_diffusion("1", learn_sigma=learn_sigma)
    model = network if learn_sigma else fixed_network
    for loop in (diffusion.p_sample_loop, diffusion.ddim_sample_loop):
        assert loop(model, LOOP_SHAPE).isfinite().all()


# ---- what is refused ----

@pytest.mark.parametrize(("options", "message"), [
    ({"use_kl": True}, "use_kl=True is not supported; DiT predicts noise and trains on MSE plus a bound"),
    ({"predict_xstart": True},
     "predict_xstart=True is not supported; DiT predicts noise and trains on MSE plus a bound"),
    ({"rescale_learned_sigmas": True},
     "rescale_learned_sigmas=True is not supported; DiT predicts noise and trains on MSE plus a bound"),
    ({"noise_schedule": "cosine"}, "noise_schedule 'cosine' is not supported; the schedule is 'linear'"),
    ({"diffusion_steps": 19}, "diffusion_steps 19: the linear schedule needs at least 20"),
])
def test_unsupported_options_are_refused_in_one_line(options, message):
    with pytest.raises(UsageError) as error:
        create_diffusion(**options)
    assert str(error.value) == message


def test_a_model_without_the_variance_is_refused():
    for learns, model, given, needed in ((True, fixed_network, 4, 8), (False, network, 8, 4)):
        with pytest.raises(UsageError) as error:
            create_diffusion(learn_sigma=learns).training_losses(model, X_START, T)
        assert str(error.value) == f"the model gives {given} channels for 4, but learn_sigma={learns} needs {needed}"


def test_classifier_guidance_is_refused():
    for loop in (create_diffusion("10").p_sample_loop, create_diffusion("10").ddim_sample_loop):
        with pytest.raises(UsageError, match="^cond_fn: guidance by a classifier is not supported; use cfg_scale$"):
            loop(network, LOOP_SHAPE, cond_fn=lambda x, t: x)


# ---- the mathematics ----

def test_other_lengths_scale_the_schedule():
    """The process ends at nearly the same noise however many steps it has."""
    assert linear_betas(500)[[0, -1]] == pytest.approx([2e-4, 0.04])
    assert create_diffusion(diffusion_steps=500).alphas_cumprod[-1] == pytest.approx(4e-5, rel=0.1)


def knows_the_noise(x, t):
    return torch.cat([NOISE, NOISE], dim=1)


def test_the_true_noise_gives_back_the_start():
    diffusion = create_diffusion()
    out = diffusion.p_mean_variance(knows_the_noise, diffusion.q_sample(X_START, T, NOISE), T, clip_denoised=False)
    assert relative_error(out["pred_xstart"], X_START) < 1e-4  # at t = 999 only 0.6 % of x_t is signal


def test_deterministic_ddim_with_the_true_noise_follows_one_line():
    diffusion = create_diffusion("10")
    x = diffusion.q_sample(X_START, torch.full((4,), 9), NOISE)
    sample = diffusion.ddim_sample_loop(knows_the_noise, SHAPE, noise=x, clip_denoised=False)
    assert relative_error(sample, X_START) < 1e-3


@pytest.mark.parametrize(("sigma_small", "table"), [(False, "betas"), (True, "posterior_variance")])
def test_fixed_variances(sigma_small, table):
    diffusion = create_diffusion(learn_sigma=False, sigma_small=sigma_small)
    out = diffusion.p_mean_variance(fixed_network, X_START, T)
    expected = torch.from_numpy(getattr(diffusion, table)[list(TIMESTEPS)]).float().view(-1, 1, 1, 1).expand(SHAPE)
    torch.testing.assert_close(out["variance"][1:], expected[1:])
    torch.testing.assert_close(out["log_variance"][1:], expected[1:].log())
    # The posterior's first variance is 0: the second stands in for it, except in the smaller variance itself.
    second = torch.tensor(diffusion.posterior_variance[1]).float()
    torch.testing.assert_close(out["log_variance"][0], second.log().expand(SHAPE[1:]))


def test_the_bound_trains_the_variance_only():
    output = torch.cat([0.3 * NOISE, 0.1 * X_START], dim=1).requires_grad_()
    losses = create_diffusion().training_losses(lambda x, t: output, X_START, T, noise=NOISE)
    vb_gradient, = torch.autograd.grad(losses["vb"].sum(), output, retain_graph=True)
    mse_gradient, = torch.autograd.grad(losses["mse"].sum(), output)
    assert not vb_gradient[:, :4].any() and vb_gradient[:, 4:].any(dim=1).any()
    assert mse_gradient[:, :4].any() and not mse_gradient[:, 4:].any()


def test_discretized_likelihood_sums_to_one_over_the_256_levels():
    levels = torch.linspace(-1, 1, 256, dtype=torch.float64)
    for mean, scale in ((0.0, 0.1), (0.97, 0.2), (-1.0, 0.5)):
        means = torch.full_like(levels, mean)
        log_likelihood = discretized_gaussian_log_likelihood(levels, means, torch.full_like(levels, scale).log())
        assert log_likelihood.exp().sum().item() == pytest.approx(1.0, abs=1e-6)


# ---- devices, types, loops ----

def test_half_precision_outputs_give_float32_losses():
    def losses(*dtypes):
        def model(x, t):
            output = network(x, t)
            for dtype in dtypes:
                output = output.to(dtype)
            return output
        return create_diffusion().training_losses(model, X_START, T, noise=NOISE)

    for dtype in (torch.bfloat16, torch.float16):
        half, rounded = losses(dtype), losses(dtype, torch.float32)
        for term, loss in half.items():
            assert loss.dtype == torch.float32
            assert torch.equal(loss, rounded[term])


def test_tables_are_copied_to_a_device_once():
    diffusion = create_diffusion()
    first = diffusion.tables(torch.device("cpu"))
    diffusion.training_losses(network, X_START, T)
    assert diffusion.tables(torch.device("cpu")) is first
    assert diffusion.tables(torch.device("meta"))["log_betas"].is_meta


def test_tables_first_used_in_inference_mode_still_train():
    diffusion = create_diffusion("10")
    with torch.inference_mode():
        diffusion.p_sample_loop(network, LOOP_SHAPE)
    x_start = X_START.clone().requires_grad_()
    diffusion.training_losses(network, x_start, torch.tensor([0, 1, 5, 9]))["loss"].sum().backward()
    assert x_start.grad.any()


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_training_losses_on_meta_need_no_values(learn_sigma):
    """On meta every read of a value raises, so this also shows that the loss never waits for the device."""
    weight = torch.ones((), device="meta", requires_grad=True)
    model = network if learn_sigma else fixed_network
    x, t = torch.empty(SHAPE, device="meta"), torch.empty(4, dtype=torch.long, device="meta")
    losses = create_diffusion("10", learn_sigma=learn_sigma).training_losses(lambda x, t: weight * model(x, t), x, t)
    losses["loss"].mean().backward()
    assert losses["loss"].shape == (4,) and weight.grad.is_meta


def test_model_kwargs_reach_the_model():
    def model(x, t, y):
        return network(x, t) + y.view(-1, 1, 1, 1)

    y, diffusion = torch.arange(4.0), create_diffusion()
    losses = diffusion.training_losses(model, X_START, T, {"y": y}, NOISE)
    expected = diffusion.training_losses(lambda x, t: model(x, t, y), X_START, T, noise=NOISE)
    assert torch.equal(losses["loss"], expected["loss"])
    assert not torch.equal(losses["loss"], diffusion.training_losses(network, X_START, T, noise=NOISE)["loss"])


@pytest.mark.parametrize("kind", ["p_sample_loop", "ddim_sample_loop"])
def test_progressive_loops_end_at_the_loops_sample(kind):
    diffusion = create_diffusion("10")
    options = dict(noise=cosine_input(LOOP_SHAPE), noise_fn=formula_noise)
    steps = list(getattr(diffusion, f"{kind}_progressive")(network, LOOP_SHAPE, **options))
    assert len(steps) == 10
    assert all(step["sample"].shape == step["pred_xstart"].shape == LOOP_SHAPE for step in steps)
    assert torch.equal(steps[-1]["sample"], getattr(diffusion, kind)(network, LOOP_SHAPE, **options))
    assert not any(step["sample"].requires_grad for step in steps)


def test_loops_without_given_noise_follow_torchs_generator():
    samples = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        samples.append(create_diffusion("10").p_sample_loop(network, LOOP_SHAPE, progress=False))
    assert torch.equal(samples[0], samples[1]) and not torch.equal(samples[0], samples[2])
    assert samples[0].abs().max() <= 1 + 1e-5  # clipped by default


def test_denoised_fn_acts_before_the_clip():
    out = create_diffusion().p_mean_variance(network, X_START, T, denoised_fn=lambda x: torch.full_like(x, 3.0))
    assert (out["pred_xstart"] == 1).all()


def test_the_progress_bar_counts_the_steps(capsys):
    create_diffusion("10").p_sample_loop(network, LOOP_SHAPE, progress=True)
    assert "10/10" in capsys.readouterr().err
