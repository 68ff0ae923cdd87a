"""Gaussian diffusion: schedule, q(x_t | x_0), training loss, respacing, DDPM and DDIM sampling. Owns no network.

A ``model`` here is any callable ``model(x, t, **model_kwargs)`` from (N, C, H, W) and (N,) timesteps of the full
schedule to the predicted noise (N, C, H, W), or (N, 2C, H, W) with the variance's interpolation after it if the
variance is learned.

Sources: [1] Ho et al. 2020, "Denoising Diffusion Probabilistic Models" (arXiv 2006.11239); [2] Nichol & Dhariwal 2021,
"Improved Denoising Diffusion Probabilistic Models" (arXiv 2102.09672); [3] Song et al. 2021, "Denoising Diffusion
Implicit Models" (arXiv 2010.02502).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dit.config import NUM_TIMESTEPS, UsageError

Model = Callable[..., Tensor]
NoiseFn = Callable[[int, Tensor], Tensor]
"""``noise_fn(step, x)``: standard normals shaped like x for the loop's step-th call of the model, counted from 1."""


def create_diffusion(timestep_respacing: str | int | Sequence[int] | None = "", noise_schedule: str = "linear",
                     use_kl: bool = False, sigma_small: bool = False, predict_xstart: bool = False,
                     learn_sigma: bool = True, rescale_learned_sigmas: bool = False,
                     diffusion_steps: int = NUM_TIMESTEPS) -> "Diffusion":
    """A diffusion process with the official function's parameters.

    ``timestep_respacing``: "" keeps every step; see :func:`space_timesteps`. ``sigma_small`` picks the smaller of the
    two fixed variances and matters only without ``learn_sigma``. Raises UsageError for what does not exist here.
    """
    unsupported = {"use_kl": use_kl, "predict_xstart": predict_xstart, "rescale_learned_sigmas": rescale_learned_sigmas}
    for name, value in unsupported.items():
        if value:
            raise UsageError(f"{name}=True is not supported; DiT predicts noise and trains on MSE plus a bound")
    if noise_schedule != "linear":
        raise UsageError(f"noise_schedule {noise_schedule!r} is not supported; the schedule is 'linear'")
    variance = "learned_range" if learn_sigma else "fixed_small" if sigma_small else "fixed_large"
    return Diffusion(linear_betas(diffusion_steps), space_timesteps(diffusion_steps, timestep_respacing), variance)


def linear_betas(num_timesteps: int) -> np.ndarray:
    """Variances of the forward steps, float64 (num_timesteps,): 1e-4 to 0.02 for 1000 ([1] section 4), else scaled."""
    if num_timesteps < 20:  # the last beta, 0.02 * 1000 / num_timesteps, must not exceed 1
        raise UsageError(f"diffusion_steps {num_timesteps}: the linear schedule needs at least 20")
    scale = NUM_TIMESTEPS / num_timesteps
    return np.linspace(scale * 1e-4, scale * 0.02, num_timesteps, dtype=np.float64)


def space_timesteps(num_timesteps: int, respacing: str | int | Sequence[int] | None) -> list[int]:
    """The timesteps a respacing keeps, ascending.

    ``"250"``: that many, evenly spread from the first to the last. ``"10,15,20"``: the schedule is cut into equal
    sections, with so many steps from each. ``"ddim50"``: every k-th step from 0, for the integer k that gives exactly
    that many ([3]). ``""``: all.
    Raises UsageError if the schedule cannot give them.
    """
    if respacing is None or respacing == "":
        return list(range(num_timesteps))
    if isinstance(respacing, str) and respacing.startswith("ddim"):
        return _integer_stride(num_timesteps, respacing)
    counts = _section_counts(respacing)
    kept: list[int] = []
    start = 0
    for index, count in enumerate(counts):
        size = num_timesteps // len(counts) + (index < num_timesteps % len(counts))
        if count > size:
            raise UsageError(f"timestep_respacing {respacing!r}: {count} steps are asked of section {index + 1}, "
                             f"which has {size}")
        stride = (size - 1) / (count - 1) if count > 1 else 1.0
        offset = 0.0  # summed, not multiplied: the official rounding
        for _ in range(count):
            kept.append(start + round(offset))
            offset += stride
        start += size
    return kept


def _integer_stride(num_timesteps: int, respacing: str) -> list[int]:
    count = respacing.removeprefix("ddim")
    if not count.isdecimal() or not 1 <= int(count) <= num_timesteps:
        raise UsageError(f"timestep_respacing {respacing!r}: 'ddim' is followed by a number from 1 to {num_timesteps}")
    for stride in range(1, num_timesteps + 1):
        if len(range(0, num_timesteps, stride)) == int(count):
            return list(range(0, num_timesteps, stride))
    raise UsageError(f"timestep_respacing {respacing!r}: no integer stride gives {count} of {num_timesteps} steps; "
                     f"'{count}' spreads them unevenly")


def _section_counts(respacing: str | int | Sequence[int]) -> list[int]:
    """Raises UsageError unless every section's number of steps is a positive integer."""
    parts = [respacing] if isinstance(respacing, int) else respacing
    parts = parts.split(",") if isinstance(parts, str) else parts
    try:
        counts = [int(part) for part in parts]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"timestep_respacing {respacing!r}: must be like '250', '10,15,20' or 'ddim50'")
    return counts


class Diffusion:
    """A diffusion process over the kept steps of a schedule.

    Args:
        betas: float64 variances of the full schedule's forward steps.
        use_timesteps: ascending timesteps to keep; the process has as many steps, and a model is always shown the full
            schedule's numbers.
        variance: ``learned_range`` (interpolated between the two bounds by the model's second half, [2] Eq. 15),
            ``fixed_large`` (beta_t) or ``fixed_small`` (the posterior's).

    The tables below are float64 arrays (num_timesteps,), as in the official code; on devices they are kept in float32.
    """

    def __init__(self, betas: np.ndarray, use_timesteps: Sequence[int], variance: str):
        assert variance in ("learned_range", "fixed_large", "fixed_small")
        self._full_betas, self.variance = betas, variance
        self.timestep_map = np.asarray(use_timesteps, dtype=np.int64)
        self.num_timesteps, self.num_full_timesteps = len(use_timesteps), len(betas)
        self._is_respaced = self.num_timesteps != self.num_full_timesteps

        # Betas that give the kept steps the alphas_cumprod of the full schedule.
        kept = np.cumprod(1.0 - betas)[self.timestep_map]
        self.betas = 1.0 - kept / np.append(1.0, kept[:-1]) if self._is_respaced else betas
        self.alphas_cumprod = np.cumprod(1.0 - self.betas)
        self.alphas_cumprod_prev = np.append(1.0, self.alphas_cumprod[:-1])
        # q(x_{t-1} | x_t, x_0), [1] Eq. 6 and 7
        self.posterior_variance = self.betas * (1.0 - self.alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)
        # The first variance is 0 and its logarithm is never used for noise: the second one takes its place.
        second = self.posterior_variance[1] if self.num_timesteps > 1 else self.betas[0]
        self.posterior_log_variance_clipped = np.log(np.append(second, self.posterior_variance[1:]))
        alphas, noise_share = 1.0 - self.betas, 1.0 - self.alphas_cumprod
        self.posterior_mean_coef1 = self.betas * np.sqrt(self.alphas_cumprod_prev) / noise_share
        self.posterior_mean_coef2 = (1.0 - self.alphas_cumprod_prev) * np.sqrt(alphas) / noise_share
        self._tables = self._float_tables()
        self._tables_on: dict[torch.device, dict[str, Tensor]] = {}

    def _float_tables(self) -> dict[str, np.ndarray]:
        large = np.append(self.posterior_variance[1], self.betas[1:]) if self.num_timesteps > 1 else self.betas
        return {
            "alphas_cumprod": self.alphas_cumprod,
            "alphas_cumprod_prev": self.alphas_cumprod_prev,
            "sqrt_alphas_cumprod": np.sqrt(self.alphas_cumprod),
            "sqrt_one_minus_alphas_cumprod": np.sqrt(1.0 - self.alphas_cumprod),
            "sqrt_recip_alphas_cumprod": np.sqrt(1.0 / self.alphas_cumprod),
            "sqrt_recipm1_alphas_cumprod": np.sqrt(1.0 / self.alphas_cumprod - 1.0),
            "log_betas": np.log(self.betas),
            "posterior_variance": self.posterior_variance,
            "posterior_log_variance_clipped": self.posterior_log_variance_clipped,
            "posterior_mean_coef1": self.posterior_mean_coef1,
            "posterior_mean_coef2": self.posterior_mean_coef2,
            "fixed_large_variance": large,
            "fixed_large_log_variance": np.log(large),
        }

    def respaced(self, timestep_respacing: str | int | Sequence[int] | None) -> "Diffusion":
        """The same process over other steps of the full schedule."""
        return Diffusion(self._full_betas, space_timesteps(self.num_full_timesteps, timestep_respacing), self.variance)

    def tables(self, device: torch.device) -> dict[str, Tensor]:
        """The tables on a device, float32, and the timestep map; copied at the first call for a device, then kept."""
        if device not in self._tables_on:
            arrays = {name: table.astype(np.float32) for name, table in self._tables.items()}
            arrays["timestep_map"] = self.timestep_map
            self._tables_on[device] = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
        return self._tables_on[device]

    def _at(self, name: str, t: Tensor) -> Tensor:
        """A table's values at timesteps (N,), shaped (N, 1, 1, 1)."""
        return self.tables(t.device)[name][t].view(-1, 1, 1, 1)

    def _call(self, model: Model, x: Tensor, t: Tensor, model_kwargs: dict | None) -> Tensor:
        """The model's output in float32 at least, timesteps translated to the full schedule."""
        if self._is_respaced:
            t = self.tables(t.device)["timestep_map"][t]
        output = model(x, t, **(model_kwargs or {}))
        channels = x.shape[1] * (2 if self.variance == "learned_range" else 1)
        if output.shape[1] != channels:
            raise UsageError(f"the model gives {output.shape[1]} channels for {x.shape[1]}, but learn_sigma="
                             f"{self.variance == 'learned_range'} needs {channels}")
        return upcast_half(output)

    # ---- the forward process and its posterior ----

    def q_sample(self, x_start: Tensor, t: Tensor, noise: Tensor | None = None) -> Tensor:
        """Draw x_t from q(x_t | x_0) ([1] Eq. 4): (N, C, H, W)."""
        noise = torch.randn_like(x_start) if noise is None else noise
        return self._at("sqrt_alphas_cumprod", t) * x_start + self._at("sqrt_one_minus_alphas_cumprod", t) * noise

    def q_posterior_mean_variance(self, x_start: Tensor, x_t: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (N, C, H, W), variance and clipped log-variance (N, 1, 1, 1) of q(x_{t-1} | x_t, x_0), [1] Eq. 6, 7."""
        mean = self._at("posterior_mean_coef1", t) * x_start + self._at("posterior_mean_coef2", t) * x_t
        return mean, self._at("posterior_variance", t), self._at("posterior_log_variance_clipped", t)

    def predict_xstart_from_eps(self, x_t: Tensor, t: Tensor, eps: Tensor) -> Tensor:
        """x_0 from x_t and its noise: [1] Eq. 4 solved for x_0."""
        return self._at("sqrt_recip_alphas_cumprod", t) * x_t - self._at("sqrt_recipm1_alphas_cumprod", t) * eps

    # ---- the model's reverse step p(x_{t-1} | x_t) ----

    def p_mean_variance(self, model: Model, x: Tensor, t: Tensor, clip_denoised: bool = True,
                        denoised_fn: Callable[[Tensor], Tensor] | None = None,
                        model_kwargs: dict | None = None) -> dict[str, Tensor]:
        """``mean``, ``variance``, ``log_variance`` and ``pred_xstart`` of the reverse step, (N, C, H, W) each.

        ``denoised_fn`` is applied to the predicted x_0, then ``clip_denoised`` clips it to [-1, 1].
        """
        output = self._call(model, x, t, model_kwargs)
        return self._p_from_output(output, x, t, clip_denoised, denoised_fn)

    def _p_from_output(self, output: Tensor, x: Tensor, t: Tensor, clip_denoised: bool,
                       denoised_fn: Callable[[Tensor], Tensor] | None = None) -> dict[str, Tensor]:
        if self.variance == "learned_range":
            eps, interpolation = output.chunk(2, dim=1)
            fraction = (interpolation + 1) / 2  # [2] Eq. 15, the model's -1..1 taken as 0..1
            log_variance = (fraction * self._at("log_betas", t)
                            + (1 - fraction) * self._at("posterior_log_variance_clipped", t))
            variance = torch.exp(log_variance)
        else:
            small = self.variance == "fixed_small"
            names = (("posterior_variance", "posterior_log_variance_clipped") if small
                     else ("fixed_large_variance", "fixed_large_log_variance"))
            eps = output
            variance, log_variance = (self._at(name, t).expand_as(x) for name in names)
        pred_xstart = self.predict_xstart_from_eps(x, t, eps)
        pred_xstart = pred_xstart if denoised_fn is None else denoised_fn(pred_xstart)
        pred_xstart = pred_xstart.clamp(-1, 1) if clip_denoised else pred_xstart
        mean = self.q_posterior_mean_variance(pred_xstart, x, t)[0]
        return {"mean": mean, "variance": variance, "log_variance": log_variance, "pred_xstart": pred_xstart}

    # ---- training ----

    def training_losses(self, model: Model, x_start: Tensor, t: Tensor, model_kwargs: dict | None = None,
                        noise: Tensor | None = None) -> dict[str, Tensor]:
        """Per-image losses (N,): ``mse`` of the predicted noise, and with a learned variance ``vb``, the variational
        bound in bits per dimension; ``loss`` is their sum. The bound trains the variance only: the mean is detached in
        it ([2] section 3.1; its weight there is 1000 steps x 0.001 = 1).
        """
        noise = torch.randn_like(x_start) if noise is None else noise
        x_t = self.q_sample(x_start, t, noise)
        output = self._call(model, x_t, t, model_kwargs)
        terms = {}
        eps = output
        if self.variance == "learned_range":
            eps, interpolation = output.chunk(2, dim=1)
            terms["vb"] = self._vb_bits(torch.cat([eps.detach(), interpolation], dim=1), x_start, x_t, t)
        terms["mse"] = _mean_per_image((noise - eps) ** 2)
        terms["loss"] = terms["mse"] + terms["vb"] if "vb" in terms else terms["mse"]
        return terms

    def _vb_bits(self, output: Tensor, x_start: Tensor, x_t: Tensor, t: Tensor) -> Tensor:
        """The variational bound's term at t, bits per dimension (N,): a KL, at t = 0 decoder likelihood ([1] Eq. 5)."""
        true_mean, _, true_log_variance = self.q_posterior_mean_variance(x_start, x_t, t)
        p = self._p_from_output(output, x_t, t, clip_denoised=False)
        kl = _mean_per_image(normal_kl(true_mean, true_log_variance, p["mean"], p["log_variance"])) / math.log(2.0)
        log_likelihood = discretized_gaussian_log_likelihood(x_start, p["mean"], 0.5 * p["log_variance"])
        return torch.where(t == 0, -_mean_per_image(log_likelihood) / math.log(2.0), kl)

    # ---- sampling ----

    @torch.no_grad()
    def p_sample(self, model: Model, x: Tensor, t: Tensor, clip_denoised: bool = True, denoised_fn=None,
                 model_kwargs: dict | None = None, noise: Tensor | None = None) -> dict[str, Tensor]:
        """One DDPM step ([1] Algorithm 2): ``sample`` and ``pred_xstart``, (N, C, H, W)."""
        noise = torch.randn_like(x) if noise is None else noise
        p = self.p_mean_variance(model, x, t, clip_denoised, denoised_fn, model_kwargs)
        is_noisy = (t != 0).to(x.dtype).view(-1, 1, 1, 1)  # the last step adds none
        sample = p["mean"] + is_noisy * torch.exp(0.5 * p["log_variance"]) * noise
        return {"sample": sample, "pred_xstart": p["pred_xstart"]}

    @torch.no_grad()
    def ddim_sample(self, model: Model, x: Tensor, t: Tensor, clip_denoised: bool = True, denoised_fn=None,
                    model_kwargs: dict | None = None, eta: float = 0.0,
                    noise: Tensor | None = None) -> dict[str, Tensor]:
        """One DDIM step ([3] Eq. 12, 16): ``sample``, ``pred_xstart``. ``eta``: 0 deterministic, 1 as noisy as DDPM."""
        noise = torch.randn_like(x) if noise is None else noise
        pred_xstart = self.p_mean_variance(model, x, t, clip_denoised, denoised_fn, model_kwargs)["pred_xstart"]
        # The noise that belongs to the predicted x_0, which may have been clipped.
        eps = (self._at("sqrt_recip_alphas_cumprod", t) * x - pred_xstart) / self._at("sqrt_recipm1_alphas_cumprod", t)
        alpha, alpha_prev = self._at("alphas_cumprod", t), self._at("alphas_cumprod_prev", t)
        sigma = eta * torch.sqrt((1 - alpha_prev) / (1 - alpha)) * torch.sqrt(1 - alpha / alpha_prev)
        mean = pred_xstart * torch.sqrt(alpha_prev) + torch.sqrt(1 - alpha_prev - sigma**2) * eps
        return {"sample": mean + sigma * noise, "pred_xstart": pred_xstart}  # alpha_prev 1 makes the last sigma 0

    def p_sample_loop_progressive(self, model: Model, shape: Sequence[int], noise: Tensor | None = None,
                                  clip_denoised: bool = True, denoised_fn=None, cond_fn=None,
                                  model_kwargs: dict | None = None, device=None, progress: bool = False, *,
                                  noise_fn: NoiseFn | None = None) -> Iterator[dict[str, Tensor]]:
        """DDPM sampling: the result of :meth:`p_sample` after every step, from the noisiest to the last.

        ``noise`` is the start, shaped ``shape``; ``noise_fn`` replaces the random numbers of the steps. Without them
        both come from torch's generator. ``cond_fn`` (guidance by a classifier) is refused.
        """
        return self._loop(self.p_sample, model, shape, noise, cond_fn, device, progress, noise_fn,
                          {"clip_denoised": clip_denoised, "denoised_fn": denoised_fn, "model_kwargs": model_kwargs})

    def p_sample_loop(self, *args, **kwargs) -> Tensor:
        """The last sample of :meth:`p_sample_loop_progressive`, whose parameters it takes."""
        return _last(self.p_sample_loop_progressive(*args, **kwargs))

    def ddim_sample_loop_progressive(self, model: Model, shape: Sequence[int], noise: Tensor | None = None,
                                     clip_denoised: bool = True, denoised_fn=None, cond_fn=None,
                                     model_kwargs: dict | None = None, device=None, progress: bool = False,
                                     eta: float = 0.0, *,
                                     noise_fn: NoiseFn | None = None) -> Iterator[dict[str, Tensor]]:
        """DDIM sampling: as :meth:`p_sample_loop_progressive`, with ``eta`` as in :meth:`ddim_sample`."""
        return self._loop(self.ddim_sample, model, shape, noise, cond_fn, device, progress, noise_fn,
                          {"clip_denoised": clip_denoised, "denoised_fn": denoised_fn, "model_kwargs": model_kwargs,
                           "eta": eta})

    def ddim_sample_loop(self, *args, **kwargs) -> Tensor:
        """The last sample of :meth:`ddim_sample_loop_progressive`, whose parameters it takes."""
        return _last(self.ddim_sample_loop_progressive(*args, **kwargs))

    def _loop(self, step_fn, model: Model, shape: Sequence[int], noise: Tensor | None, cond_fn, device, progress: bool,
              noise_fn: NoiseFn | None, step_kwargs: dict) -> Iterator[dict[str, Tensor]]:
        if cond_fn is not None:
            raise UsageError("cond_fn: guidance by a classifier is not supported; use cfg_scale")
        x = torch.randn(*shape, device=device or _device_of(model)) if noise is None else noise
        assert tuple(x.shape) == tuple(shape), f"noise is {tuple(x.shape)}, shape {tuple(shape)}"
        steps = range(self.num_timesteps)
        if progress:
            from tqdm.auto import tqdm
            steps = tqdm(steps)
        for step in steps:
            t = torch.full((shape[0],), self.num_timesteps - 1 - step, dtype=torch.long, device=x.device)
            fresh = None if noise_fn is None else noise_fn(step + 1, x)
            out = step_fn(model, x, t, noise=fresh, **step_kwargs)
            yield out
            x = out["sample"]


def upcast_half(x: Tensor) -> Tensor:
    """Half precision to float32, other types as they are: losses and samples are never computed in half precision."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def normal_kl(mean1: Tensor, log_variance1: Tensor, mean2: Tensor, log_variance2: Tensor) -> Tensor:
    """KL divergence of two diagonal Gaussians, in nats, elementwise."""
    return 0.5 * (-1.0 + log_variance2 - log_variance1 + torch.exp(log_variance1 - log_variance2)
                  + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def discretized_gaussian_log_likelihood(x: Tensor, means: Tensor, log_scales: Tensor) -> Tensor:
    """Log-likelihood in nats, elementwise, of x in [-1, 1] seen as 256 levels, under Gaussians ([1] Eq. 13)."""
    inverse_std, centered = torch.exp(-log_scales), x - means
    cdf_above = _approx_normal_cdf(inverse_std * (centered + 1.0 / 255.0))
    cdf_below = _approx_normal_cdf(inverse_std * (centered - 1.0 / 255.0))
    inside = torch.log((cdf_above - cdf_below).clamp(min=1e-12))
    lowest, highest = torch.log(cdf_above.clamp(min=1e-12)), torch.log((1.0 - cdf_below).clamp(min=1e-12))
    return torch.where(x < -0.999, lowest, torch.where(x > 0.999, highest, inside))


def _approx_normal_cdf(x: Tensor) -> Tensor:
    """The standard normal's distribution function, approximated by tanh (Page 1977)."""
    return 0.5 * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def _mean_per_image(x: Tensor) -> Tensor:
    return x.flatten(1).mean(dim=1)


def _device_of(model: Model) -> torch.device:
    parameter = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    return torch.device("cpu") if parameter is None else parameter.device


def _last(outputs: Iterator[dict[str, Tensor]]) -> Tensor:
    return deque(outputs, maxlen=1)[0]["sample"]
