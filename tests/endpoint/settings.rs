//! Settings that can be honoured, and those that can't.

use std::time::Duration;

use ringfence::transport::endpoint::{AckFrequency, Congestion, PathSettings};

/// Changes a setting of the defaults.
fn with(change: impl FnOnce(&mut PathSettings)) -> PathSettings {
    let mut settings = PathSettings::default();
    change(&mut settings);
    settings
}

#[test]
fn the_defaults_and_bbr_can_be_honoured() {
    assert_eq!(PathSettings::default().check(), Ok(()));
    assert_eq!(with(|settings| settings.congestion = Congestion::Bbr).check(), Ok(()));
    let debug = format!("{:?}", PathSettings::default().transport_config());
    assert!(debug.contains("max_concurrent_uni_streams: 0"), "{debug}");
}

#[test]
fn what_cannot_be_honoured_is_named_with_its_value_and_bounds() {
    let floor = |floor_bytes| Congestion::CubicWithFloor { floor_bytes };
    let acks = |packets, delay| Some(AckFrequency { packets, delay: Duration::from_micros(delay) });
    for (settings, expected) in [
        (with(|s| s.congestion = floor(2_399)), "floor_bytes = 2399: must be 2400 bytes to initial_window"),
        (with(|s| s.congestion = floor(1 << 30)), "floor_bytes = 1073741824: must be 2400 bytes to initial_window"),
        (with(|s| s.initial_window = 0), "initial_window = 0: must be 2400 bytes to 1 TiB"),
        (with(|s| s.initial_window = u64::MAX), "initial_window = 18446744073709551615: must be 2400 bytes to 1 TiB"),
        (with(|s| s.initial_rtt = Duration::ZERO), "initial_rtt = 0ns: must be 1 ms to 24 h"),
        (with(|s| s.acks = acks(0, 5_000)), "acks.packets = 0: must be 1 to 1000"),
        (with(|s| s.acks = acks(8, 999)), "acks.delay = 999µs: must be 1 ms to 1 s"),
        (with(|s| s.send_window = 0), "send_window = 0: must be 1 byte to 1 TiB"),
        (with(|s| s.stream_window = 0), "stream_window = 0: must be above 0"),
        (with(|s| s.connection_window = 9), "connection_window = 9: must be at least stream_window"),
        (with(|s| s.streams_max = 0), "streams_max = 0: must be 1 to 65536"),
        (with(|s| s.streams_max = u32::MAX), "streams_max = 4294967295: must be 1 to 65536"),
        (with(|s| s.keep_alive = Duration::ZERO), "keep_alive = 0ns: must be above 0 and below idle_timeout"),
        (with(|s| s.keep_alive = s.idle_timeout), "keep_alive = 5s: must be above 0 and below idle_timeout"),
        (with(|s| s.idle_timeout = Duration::from_secs(86_401)), "idle_timeout = 86401s: must be 1 ms to 24 h"),
        (with(|s| s.handshake_timeout = Duration::ZERO), "handshake_timeout = 0ns: must be 1 ms to 24 h"),
        (with(|s| s.udp_payload_max = 1_199), "udp_payload_max = 1199: must be 1200 to 65527 bytes"),
        (with(|s| s.udp_payload_max = 65_528), "udp_payload_max = 65528: must be 1200 to 65527 bytes"),
        (with(|s| s.socket_receive_bytes = 0), "socket_receive_bytes = 0: must be 1 byte to 1 GiB"),
        (
            with(|s| s.socket_send_bytes = usize::MAX / 2),
            "socket_send_bytes = 9223372036854775807: must be 1 byte to 1 GiB",
        ),
    ] {
        assert_eq!(settings.check().unwrap_err().to_string(), format!("setting {expected}"));
        // Not checked, it is cut and does not panic.
        drop(settings.transport_config());
    }
    let many = with(|s| s.priorities = vec![("/x".to_owned(), 1); 17]);
    let odd = with(|s| s.priorities = vec![("x".to_owned(), 1)]);
    for settings in [many, odd] {
        assert_eq!(settings.check().unwrap_err().name, "priorities");
    }
}
