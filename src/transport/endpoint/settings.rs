//! How connections behave: windows, timers, buffers, priorities.

use std::sync::Arc;
use std::time::Duration;

use quinn::congestion::{BbrConfig, ControllerFactory};
use quinn::{AckFrequencyConfig, IdleTimeout, MtuDiscoveryConfig, TransportConfig, VarInt};

use super::congestion::{FLOOR_MIN, FlooredCubicConfig};

/// Smallest UDP payload that every QUIC path carries, in bytes.
const UDP_PAYLOAD_MIN: u16 = 1200;

/// Largest UDP payload that there is, in bytes.
const UDP_PAYLOAD_MAX: u16 = 65_527;

/// UDP payload that is always taken from peers: an Ethernet packet without its IPv4 and UDP headers.
const UDP_PAYLOAD_TAKEN: u16 = 1472;

/// Largest window, in bytes: QUIC's largest number is larger, and no host has as much memory.
const WINDOW_MAX: u64 = 1 << 40;

/// Longest time of any timer.
const TIME_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Most streams that a peer may hold open.
const STREAMS_MAX: u32 = 1 << 16;

/// Most priorities that are looked for.
const PRIORITIES_MAX: usize = 16;

/// How the bytes in flight react to loss.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Congestion {
    /// Cubic, as TCP has it, whose window never falls below `floor_bytes`. Fair to others above the
    /// floor; below it the application's own bound on what is in flight must do.
    CubicWithFloor {
        /// The floor, in bytes: from 2,400 to `initial_window`.
        floor_bytes: u64,
    },
    /// BBR, which goes by the rate that gets through and not by loss. quinn calls its own
    /// experimental.
    Bbr,
}

/// How often a peer is asked to acknowledge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckFrequency {
    /// Packets that may come without an acknowledgement for each: 1 acknowledges every second.
    pub packets: u32,
    /// How long an acknowledgement may wait for more packets.
    pub delay: Duration,
}

/// How the connections of a transport behave. Both ends should have the same.
#[derive(Debug, Clone)]
pub struct PathSettings {
    /// How the bytes in flight react to loss.
    pub congestion: Congestion,
    /// Bytes that may be in flight at the start.
    pub initial_window: u64,
    /// The round trip that is assumed before one is measured.
    pub initial_rtt: Duration,
    /// How often the peer is asked to acknowledge; `None` leaves it to QUIC.
    pub acks: Option<AckFrequency>,
    /// Bytes that a connection takes from its streams and keeps until they are acknowledged.
    pub send_window: u64,
    /// Bytes that a peer may send on one stream before they are read.
    pub stream_window: u32,
    /// Bytes that a peer may send on all streams before they are read.
    pub connection_window: u32,
    /// Streams that a peer may hold open.
    pub streams_max: u32,
    /// Whether streams of one priority share the path packet by packet.
    pub share_fairly: bool,
    /// After how long without a packet one is sent to stay alive.
    pub keep_alive: Duration,
    /// After how long without a packet a connection is dead.
    pub idle_timeout: Duration,
    /// How long a handshake may take.
    pub handshake_timeout: Duration,
    /// Largest UDP payload that is tried on a path.
    pub udp_payload_max: u16,
    /// Receive buffer that the system is asked for.
    pub socket_receive_bytes: usize,
    /// Send buffer that the system is asked for.
    pub socket_send_bytes: usize,
    /// Which streams go first.
    pub priorities: Vec<(String, i32)>,
}

impl Default for PathSettings {
    fn default() -> Self {
        Self {
            congestion: Congestion::CubicWithFloor { floor_bytes: 768 << 10 },
            initial_window: 1 << 20,
            initial_rtt: Duration::from_millis(100),
            acks: Some(AckFrequency { packets: 1, delay: Duration::from_millis(10) }),
            send_window: 8 << 20,
            stream_window: 1 << 20,
            connection_window: 20 << 20,
            streams_max: 72,
            share_fairly: false,
            keep_alive: Duration::from_secs(1),
            idle_timeout: Duration::from_secs(5),
            handshake_timeout: Duration::from_secs(5),
            udp_payload_max: 1452,
            socket_receive_bytes: 4 << 20,
            socket_send_bytes: 4 << 20,
            priorities: vec![("/ringfence/control/".to_owned(), 1)],
        }
    }
}

/// A setting that can't be honoured.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("setting {name} = {value}: {why}")]
pub struct PathSettingError {
    /// The setting.
    pub name: &'static str,
    /// Its value.
    pub value: String,
    /// What it must be.
    pub why: &'static str,
}

/// Says that a setting must hold.
fn hold(
    holds: bool,
    name: &'static str,
    value: &dyn std::fmt::Debug,
    why: &'static str,
) -> Result<(), PathSettingError> {
    if holds { Ok(()) } else { Err(PathSettingError { name, value: format!("{value:?}"), why }) }
}

impl PathSettings {
    /// Says whether all settings can be honoured.
    ///
    /// # Errors
    /// [`PathSettingError`] for the first one that can't be.
    pub fn check(&self) -> Result<(), PathSettingError> {
        self.check_windows()?;
        self.check_times()?;
        let payload = UDP_PAYLOAD_MIN..=UDP_PAYLOAD_MAX;
        hold(
            payload.contains(&self.udp_payload_max),
            "udp_payload_max",
            &self.udp_payload_max,
            "must be 1200 to 65527 bytes",
        )?;
        for (name, bytes) in
            [("socket_receive_bytes", self.socket_receive_bytes), ("socket_send_bytes", self.socket_send_bytes)]
        {
            let fits = (1..=i32::MAX as usize / 2).contains(&bytes);
            hold(fits, name, &bytes, "must be 1 byte to 1 GiB")?;
        }
        let sane = self.priorities.len() <= PRIORITIES_MAX
            && self.priorities.iter().all(|(prefix, _)| prefix.starts_with('/'));
        hold(
            sane,
            "priorities",
            &self.priorities,
            "must be up to 16 prefixes of protocol names, each with a / in front",
        )
    }

    fn check_windows(&self) -> Result<(), PathSettingError> {
        let window = 1..=WINDOW_MAX;
        hold(
            (FLOOR_MIN..=WINDOW_MAX).contains(&self.initial_window),
            "initial_window",
            &self.initial_window,
            "must be 2400 bytes to 1 TiB",
        )?;
        if let Congestion::CubicWithFloor { floor_bytes } = &self.congestion {
            hold(
                (FLOOR_MIN..=self.initial_window).contains(floor_bytes),
                "floor_bytes",
                floor_bytes,
                "must be 2400 bytes to initial_window",
            )?;
        }
        hold(window.contains(&self.send_window), "send_window", &self.send_window, "must be 1 byte to 1 TiB")?;
        hold(self.stream_window > 0, "stream_window", &self.stream_window, "must be above 0")?;
        hold(
            self.connection_window >= self.stream_window,
            "connection_window",
            &self.connection_window,
            "must be at least stream_window",
        )?;
        hold((1..=STREAMS_MAX).contains(&self.streams_max), "streams_max", &self.streams_max, "must be 1 to 65536")
    }

    fn check_times(&self) -> Result<(), PathSettingError> {
        let millisecond = Duration::from_millis(1);
        for (name, time) in [
            ("initial_rtt", self.initial_rtt),
            ("idle_timeout", self.idle_timeout),
            ("handshake_timeout", self.handshake_timeout),
        ] {
            hold((millisecond..=TIME_MAX).contains(&time), name, &time, "must be 1 ms to 24 h")?;
        }
        if let Some(AckFrequency { packets, delay }) = &self.acks {
            hold((1..=1_000).contains(packets), "acks.packets", packets, "must be 1 to 1000")?;
            let second = Duration::from_secs(1);
            hold((millisecond..=second).contains(delay), "acks.delay", delay, "must be 1 ms to 1 s")?;
        }
        hold(
            !self.keep_alive.is_zero() && self.keep_alive < self.idle_timeout,
            "keep_alive",
            &self.keep_alive,
            "must be above 0 and below idle_timeout",
        )
    }

    /// The settings as quinn takes them, for a client or a server.
    ///
    /// What [`PathSettings::check`] refuses is cut to the nearest that quinn takes.
    #[must_use]
    pub fn transport_config(&self) -> Arc<TransportConfig> {
        let mut config = TransportConfig::default();
        let idle_ms = u32::try_from(self.idle_timeout.as_millis()).unwrap_or(u32::MAX);
        let mut mtu = MtuDiscoveryConfig::default();
        mtu.upper_bound(self.udp_payload_max);
        config
            .congestion_controller_factory(self.controller())
            .initial_rtt(self.initial_rtt)
            .ack_frequency_config(self.acks.map(AckFrequency::config))
            .send_window(self.send_window)
            .stream_receive_window(self.stream_window.into())
            .receive_window(self.connection_window.into())
            .max_concurrent_bidi_streams(self.streams_max.into())
            .send_fairness(self.share_fairly)
            .keep_alive_interval(Some(self.keep_alive))
            .max_idle_timeout(Some(IdleTimeout::from(VarInt::from_u32(idle_ms))))
            .mtu_discovery_config(Some(mtu))
            // libp2p knows two-way streams only.
            .max_concurrent_uni_streams(0_u32.into())
            .datagram_receive_buffer_size(None)
            // The bit would tell onlookers the round trip.
            .allow_spin(false);
        Arc::new(config)
    }

    /// Largest UDP payload that is taken from a peer, in bytes.
    pub(super) fn udp_payload_taken(&self) -> u16 {
        self.udp_payload_max.clamp(UDP_PAYLOAD_TAKEN, UDP_PAYLOAD_MAX)
    }

    fn controller(&self) -> Arc<dyn ControllerFactory + Send + Sync> {
        match self.congestion {
            Congestion::CubicWithFloor { floor_bytes } => {
                Arc::new(FlooredCubicConfig::new(self.initial_window, floor_bytes))
            }
            Congestion::Bbr => {
                let mut bbr = BbrConfig::default();
                bbr.initial_window(self.initial_window);
                Arc::new(bbr)
            }
        }
    }
}

impl AckFrequency {
    fn config(self) -> AckFrequencyConfig {
        let mut config = AckFrequencyConfig::default();
        config.ack_eliciting_threshold(self.packets.into()).max_ack_delay(Some(self.delay));
        config
    }
}
