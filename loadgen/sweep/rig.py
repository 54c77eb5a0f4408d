"""The instruments of a sweep: the gateway, brought back when it is lost; the law; the present speed
of the engine.

The law is calibrated once, at the first start, and kept: rates and timetables follow from it and
must not change after an interruption. How fast the engine is now, against that law, is measured
around every cell.
"""

from __future__ import annotations

import asyncio
import dataclasses
from dataclasses import dataclass, field

import msgspec

from kendall.loadgen.gateway.gateway_process import GatewayError
from kendall.loadgen.sending.client.endpoint import look_at, with_lengths
from kendall.loadgen.sending.client.target import NO_KEYS, Keys, LoadError, Target
from kendall.loadgen.sending.operating_system import pin_to_gateway_cpus
from kendall.loadgen.sweep.gateway import (
    GivenGateway,
    OwnGateway,
    SweptGateway,
    bounds_of,
    until_idle,
)
from kendall.loadgen.sweep.grid import Basis, GatewayBounds
from kendall.loadgen.sweep.plain_server import PlainServer
from kendall.loadgen.sweep.plan import SweepPlan
from kendall.loadgen.sweep.status import Status
from kendall.loadgen.sweep.store import Store
from kendall.policies.text import SpecError
from kendall.queueing.latency.law import LatencyModel
from kendall.queueing.latency.profile import Profile, load_law, poor_fit_of

RESTARTS = 5  # of the gateway, in one session
BACK_OFF = 1.0  # seconds before the first; doubled each time
STARTING, CALIBRATING = 10.0, 15.0  # seconds, about


def given_server(plan: SweepPlan, keys: Keys = NO_KEYS) -> SweptGateway | None:
    """The gateway or other server that the plan names; None where the sweep starts its own."""
    if plan.base_url is None:
        return None
    return PlainServer(plan, keys) if plan.plain_server else GivenGateway(plan.base_url, keys)


@dataclass(slots=True)
class Rig:
    """The test rig of one session: its gateway and what is known of it."""

    plan: SweepPlan
    store: Store
    status: Status
    gateway: SweptGateway
    repeats: int = 5  # of each cell of the calibration
    basis: Basis = field(init=False)
    target: Target = field(init=False)
    speed: float | None = None  # of the last measurement, until something was run since
    restarts: int = 0
    keys: Keys = NO_KEYS

    @classmethod
    def of(
        cls, plan: SweepPlan, store: Store, status: Status, port: int, keys: Keys = NO_KEYS
    ) -> Rig:
        """With a gateway of its own, or the one that the plan names."""
        gateway = given_server(plan, keys) or OwnGateway(plan, store.folder, port)
        return cls(plan, store, status, gateway, keys=keys)

    async def open(self) -> None:
        """Gateway up, law known. Raises GatewayError; SpecError where the sweep began on another
        engine.
        """
        self.status.phase(
            "starting the gateway and its engine"
            if not self.plan.base_url
            else "looking for the gateway",
            STARTING,
        )
        await self.start()
        bounds = await bounds_of(self.gateway.client)
        if isinstance(self.gateway, OwnGateway):
            pin_to_gateway_cpus()
        calibrated = self.store.journal.last("calibrated")
        if calibrated is None:
            law = await self._calibrated(bounds)
            self.store.append("calibrated", law=str(law), bounds=msgspec.to_builtins(bounds))
        elif (known := msgspec.convert(calibrated["bounds"], GatewayBounds)) != bounds:
            raise SpecError(
                f"got a gateway with {bounds}; expected one with {known}, with which the sweep "
                "began"
            )
        else:
            law = load_law(calibrated["law"])
            if (warning := self.store.poor_fit) is not None:
                self.status.note(f"warning: {warning}")
        self.basis = Basis(self.plan, law, bounds)

    async def speed_now(self) -> float:
        """Measured over lawful time, of a few batches; 1 where no calibration was asked for."""
        if not self.plan.bracket:
            return 1.0
        if self.speed is None:
            self.status.phase("measuring the speed of the engine", self.plan.bracket)
            body = {
                "speed_only": True,
                "seconds": self.plan.bracket,
                "latency": str(self.basis.law),
            }
            self.speed = (await self._ask_calibration(body, self.basis)).law.speed
        return self.speed

    async def recover(self, reason: str) -> None:
        """Bring the gateway back. Raises GatewayError when it was lost too often."""
        while self.restarts < RESTARTS:
            wait = BACK_OFF * 2**self.restarts
            self.restarts += 1
            self.speed = None
            self.status.phase(
                f"the gateway was lost ({reason}); started again in {wait:.0f} s", wait + STARTING
            )
            await asyncio.sleep(wait)
            try:
                await self.start()
            except GatewayError as error:
                reason = str(error)
                continue
            self.store.append("restarted", number=self.restarts, reason=reason)
            self.status.note(
                f"the gateway was lost ({reason}) and was started again ({self.restarts} of "
                f"{RESTARTS} times)"
            )
            return
        raise GatewayError(
            f"the gateway was lost {RESTARTS + 1} times, the last time: {reason}; the same "
            "command continues the sweep"
        )

    async def close(self) -> None:
        self.status.phase("stopping")
        await self.gateway.stop()

    async def start(self) -> None:
        """Start the gateway, or wait for it, and look at its endpoint. Raises GatewayError."""
        await self.gateway.start()
        url, keys = self.gateway.client.url, self.keys
        target = Target(base_url=url, model="", api_key=keys.api_key, trust=keys.trust)
        try:
            endpoint = await look_at(target)
            self.target, note = with_lengths(
                dataclasses.replace(target, model=endpoint.models[0]), endpoint
            )
        except LoadError as error:
            raise GatewayError(str(error)) from None
        if note is not None:
            self.status.note(note)

    async def _calibrated(self, bounds: GatewayBounds) -> LatencyModel:
        if self.plan.latency is not None:
            law = load_law(self.plan.latency).at_speed(1.0)
            if warning := poor_fit_of(self.plan.latency):
                self.status.note(f"warning: {warning}")
            self.store.write_profile(
                Profile(name="given", law=law, note="given by --latency, not measured here")
            )
            return law
        self.status.phase("calibrating the engine's law", CALIBRATING)
        await until_idle(self.gateway.client, self.status.note)
        profile = await self._ask_calibration(
            {"repeats": self.repeats}, Basis(self.plan, LatencyModel(k4=1.0), bounds)
        )
        self.store.write_profile(profile)
        self.status.note(
            f"law: {profile.law.rounded()} (R2 {profile.r2 or 0:.4f}, cells within "
            f"{profile.mape or 0:.1%} on average)"
        )
        if profile.poor_fit is not None:
            self.status.note(f"warning: {profile.poor_fit}")
        return profile.law.at_speed(1.0)

    async def _ask_calibration(self, body: dict[str, object], basis: Basis) -> Profile:
        """With the lengths of the plan: a law holds where it was measured, which is with prompts
        of up to four times those asked for.
        """
        prompts = basis.prompt_tokens
        usual = max(prompts.shortest, min(prompts.mean, prompts.longest / 4))
        sizes = {
            "max_output_tokens": max(2, basis.longest),
            "prompt_tokens": max(1, round(usual)),
        }
        return Profile.from_dict(
            await self.gateway.client.ask("POST", "/admin/calibrate", body | sizes)
        )
