//! The emulated WAN: its paths by virtual time, its text, its proxy over loopback, and a ring behind it.

#![allow(clippy::unwrap_used, reason = "a test stops at the first surprise")]

#[path = "wan/commands.rs"]
mod commands;
#[path = "wan/path.rs"]
mod path;
#[path = "wan/proxy.rs"]
mod proxy;
#[path = "wan/settings.rs"]
mod settings;
