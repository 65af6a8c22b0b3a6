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
    /// Cubic, as TCP has it, whose window never falls below `floor_bytes`. Above the floor it is as
    /// fair to others as TCP; below, the bound that the application sets itself must do.
    CubicWithFloor {
        /// The floor, in bytes: 2,400 to `initial_window`.
        floor_bytes: u64,
    },
    /// BBR, which goes by the rate that gets through and not by loss. quinn calls its own
    /// experimental; it takes no floor.
    Bbr,
}

/// How often a peer is asked to acknowledge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AckFrequency {
    /// Packets that may come without an acknowledgement, 1 to 1,000: at 1 every second packet has
    /// one. Larger saves the peer's packets, and tells of a loss later where packets overtake one
    /// another.
    pub packets: u32,
    /// How long the last ones may wait for theirs, 1 ms to 1 s. Larger makes whoever waits for them
    /// send again later; QUIC's own is 25 ms.
    pub delay: Duration,
}

/// How the connections of a transport behave. Both ends should have the same.
///
/// The defaults are for frames of some tens of KiB, one to sixteen of them in flight, over any
/// network from one host to another continent. What they rest on is measured by `cargo bench
/// --bench path`: frames of 33,000 bytes there and a few bytes back, times in ms, round trip 40 ms.
///
/// | window and floor, KiB    | one in flight, p50: no loss | 0.1 % | 1 % | sixteen, p50: no loss | 0.1 % | 1 % |
/// |--------------------------|-----|----|----|----|-----|-----|
/// | 12, none (QUIC's own)    | 61  | 65 | 82 | 42 | 107 | 970 |
/// | 1024, none               | 41  | 43 | 81 | 42 | 58  | 627 |
/// | 256, floor 64            | 45  | 47 | 52 | 41 | 89  | 296 |
/// | 256, floor 256           | 45  | 45 | 46 | 41 | 83  | 78  |
/// | 1024, floor 512          | 41  | 41 | 43 | 41 | 46  | 49  |
/// | **1024, floor 768**      | 41  | 41 | 41 | 41 | 44  | 46  |
/// | 1024, floor 1024         | 41  | 41 | 41 | 41 | 44  | 46  |
/// | BBR, 1024                | 41  | 41 | 42 | 41 | 45  | 47  |
#[derive(Debug, Clone)]
pub struct PathSettings {
    /// How the bytes in flight react to loss. Default Cubic with a floor of 768 KiB: sixteen frames
    /// of 33 KB and what is sent again fit into it (see the table).
    ///
    /// A larger floor gives larger bursts their full speed on a path that loses packets. On a path
    /// that is too slow it fills the queue and keeps it full, unless the application bounds what is
    /// in flight: sixteen frames at once over 20 Mbit/s with a queue of 128 KB lose 8 % of the
    /// packets without a floor, 17 % with 256 KiB, 38 % with 768 KiB, at the same 2.4 MB/s; one
    /// frame at a time loses none with any.
    pub congestion: Congestion,
    /// Bytes that may be in flight at the start, 2,400 to 2⁴⁰. Default 1 MiB: packets are paced to
    /// a window a round trip, so a frame is out in less than a millisecond more than the path takes
    /// only where the window is many times the frame (256 KiB cost it 4 ms of 41, 12 KiB 20 ms).
    /// Larger floods a slow path at the start.
    pub initial_window: u64,
    /// The round trip that is assumed before one is measured, 1 ms to 24 h. Default 100 ms: what is
    /// lost of a handshake is sent again after three times as long. QUIC's own 333 ms made the
    /// slowest of 160 handshakes over 40 ms with 5 % loss take 3.4 s, 100 ms 1.0 s. Smaller sends
    /// again what was only slow.
    pub initial_rtt: Duration,
    /// How often the peer is asked to acknowledge; `None` leaves it to QUIC. Default every second
    /// packet, and the last within 10 ms: with 1 % loss the slowest hundredth of single frames then
    /// takes 135 ms in place of 149, and with 5 ms of jitter 154 in place of 175. A shorter delay
    /// gains little more; with more packets the last number is 240.
    pub acks: Option<AckFrequency>,
    /// Bytes that a connection takes from its streams and keeps until they are acknowledged, 1 to
    /// 2⁴⁰. Default 8 MiB. Larger holds more memory for a peer that is slow; smaller than what is
    /// in flight slows a path down.
    pub send_window: u64,
    /// Bytes that a peer may send on one stream before they are read, above 0. Default 1 MiB: 26
    /// MB/s a stream at 40 ms. Larger costs memory while nobody reads.
    pub stream_window: u32,
    /// Bytes that a peer may send on all streams before they are read, at least `stream_window`.
    /// Default 20 MiB: more than sixteen full streams, as many as there are data lanes by default, so
    /// that data which nobody reads never keeps control out. Larger costs that memory for each peer
    /// that floods.
    pub connection_window: u32,
    /// Streams that a peer may hold open, 1 to 65,536. Default 72: control, up to 64 data lanes,
    /// and what is being agreed on. Larger lets a peer hold more of them for nothing.
    pub streams_max: u32,
    /// Whether streams of one priority take turns, packet by packet. Default no: what was written
    /// first goes first, so of several frames the first is whole early instead of all being whole
    /// late. Over sixteen streams, sixteen in flight at 50 Mbit/s, nine of ten frames are there
    /// after 92 ms in place of 122, and with 0.1 % loss and no bound on the rate after 49 in place
    /// of 80. Turns keep a long frame from holding up a short one behind it.
    pub share_fairly: bool,
    /// After how long without a packet one is sent, above 0 and below `idle_timeout`. Default 1 s:
    /// a NAT's entry stays, and four may be lost before the connection is given up. Larger risks
    /// both; smaller costs packets.
    pub keep_alive: Duration,
    /// After how long without a packet a connection is dead, 1 ms to 24 h; the smaller of both
    /// sides' counts. Default 5 s. Larger notices a dead peer later, smaller takes a network that
    /// stumbles for a dead one.
    pub idle_timeout: Duration,
    /// How long a handshake may take, 1 ms to 24 h, and a dial as the listener may wait for it.
    /// Default 5 s. Larger lets silent strangers hold a connection for longer, smaller gives up on
    /// paths that lose packets.
    pub handshake_timeout: Duration,
    /// Largest UDP payload that is tried on a path, 1,200 to 65,527 bytes. Default 1,452: an
    /// Ethernet packet of IPv6. Larger makes one frame at a time on loopback up to twice as fast,
    /// costs receive buffers of 2,048 times as much for each socket, and falls back to 1,200 for
    /// minutes when the system's buffer drops such packets, which sixteen frames at once make it
    /// do.
    pub udp_payload_max: u16,
    /// Receive buffer that the system is asked for, in bytes, up to 1 GiB. Default 4 MiB; the
    /// system may give less (`net.core.rmem_max`). Larger holds longer bursts while this process
    /// has no turn: of sixteen frames at once on loopback, 208 KiB, which is Linux' own, lose 8 %
    /// of the packets and 1 MiB none.
    pub socket_receive_bytes: usize,
    /// Send buffer that the system is asked for, in bytes, up to 1 GiB. Default 4 MiB; the system
    /// may give less (`net.core.wmem_max`). Larger holds more that can't be taken back.
    pub socket_send_bytes: usize,
    /// Which streams go first: prefixes of protocol names, and the priority of their streams, of
    /// which the first that fits counts; the others have 0, and a larger number goes first. Up to
    /// 16. Default 1 for `/ringfence/control/`, so that control goes before all data that waits, at
    /// both ends. Each stream looks for its name in the first bytes that it writes; without any
    /// priority none looks.
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
