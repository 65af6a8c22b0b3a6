//! `ringctl wan`: an emulated wide-area network in front of processes that are already there.
//!
//! Speaks on stdout (`READY {…}`, then `OK {…}`, `ERROR {…}` and `STATS {…}` lines) and listens for
//! commands on stdin, one a line.

use std::io::{BufRead, Read};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cli::console::{self, Failure, Signals};
use crate::cli::wan_control::Control;
use crate::wan::{Proxy, ProxyHandle, ProxySettings, SettingsError, WanSettings, Way};

/// Longest command, in bytes.
pub(super) const LINE_BYTES_MAX: usize = 4 << 10;

/// Commands that wait.
const LINES_MAX: usize = 16;

/// Options of `ringctl wan`.
#[derive(Debug, Clone, Args)]
pub struct WanArgs {
    /// UDP address to listen on, one for each --to; default: free ports of 127.0.0.1
    #[arg(long, value_name = "IP:PORT")]
    pub listen: Vec<SocketAddr>,
    /// UDP address of the process behind; more than one may be given, each gets a proxy of its own
    #[arg(long, value_name = "IP:PORT", required = true)]
    pub to: Vec<SocketAddr>,
    /// What the network does, such as rtt=40ms,jitter=2ms,loss=0.1%,rate=50mbit,queue=256kb; once
    /// for all proxies, or one for each --to
    #[arg(long, value_name = "SETTINGS", default_value = "none")]
    pub set: Vec<WanSettings>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Clients of each proxy at once
    #[arg(long, value_name = "N", default_value_t = ProxySettings::default().clients_max)]
    pub clients: usize,
    /// Print a STATS line a proxy every so often
    #[arg(long, value_name = "SECONDS")]
    pub stats_every: Option<f64>,
    /// Take commands on this Unix socket too: a file that only this user may open; `ringctl churn` cuts
    /// hops there
    #[arg(long, value_name = "FILE")]
    pub control: Option<PathBuf>,
    /// End when stdin closes: for a program that starts an emulated network
    #[arg(long, hide = true)]
    pub parent_pipe: bool,
}

/// What a line on stdin asks for; `proxy` is the place of one, `None` means all.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Command {
    proxy: Option<usize>,
    action: Action,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Action {
    /// Change the named fields.
    Set(String),
    /// Let nothing through.
    Cut(Vec<Way>),
    /// Take back every cut.
    Heal,
    /// Tell what there is.
    List,
    /// Tell what became of the packets.
    Stats,
}

/// Why a command was not done.
#[derive(Debug, thiserror::Error)]
enum CommandError {
    #[error(
        "{line:?}: expected `set SETTINGS`, `cut in`, `cut out`, `cut both`, `heal`, `list` or `stats`, with the number of a proxy before it where it is for one"
    )]
    Unknown { line: String },
    #[error("proxy {proxy}: expected a number below {count}, the proxies that there are")]
    NoSuchProxy { proxy: usize, count: usize },
    #[error(transparent)]
    Settings(#[from] SettingsError),
    #[error("a command longer than {LINE_BYTES_MAX} bytes was skipped")]
    TooLong,
}

/// Runs the command.
pub fn run(args: &WanArgs) -> ExitCode {
    console::exit(start(args))
}

fn start(args: &WanArgs) -> Result<(), Failure> {
    let every = args.stats_every.map(seconds).transpose()?;
    let proxies = Proxies::start(args)?;
    let control = args.control.as_deref().map(Control::bind).transpose().map_err(Failure::of("control"))?;
    let listening: Vec<Value> = proxies.0.iter().map(describe).collect();
    console::line(&format!("READY {}", json!({ "proxies": listening, "pid": std::process::id() })));
    let ends = args.parent_pipe;
    console::runtime()?.block_on(async {
        let mut signals = Signals::new()?;
        let listen = async {
            match &control {
                Some(control) => control.serve(|line| answer(&proxies, Ok(line))).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = obey(&proxies, ends) => {}
            listened = listen => listened.map_err(Failure::of("control"))?,
            () = tell(&proxies, every) => {}
            () = signals.next() => {}
        }
        Ok(())
    })
}

fn seconds(value: f64) -> Result<Duration, Failure> {
    if (0.01..=86_400.0).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err(Failure::new("config", format!("--stats-every {value}: expected 0.01 to 86400 seconds")))
    }
}

/// Does what stdin asks for. Ends with stdin if `ends`, else never.
async fn obey(proxies: &Proxies, ends: bool) {
    let (sender, mut lines) = mpsc::channel(LINES_MAX);
    // A thread of its own: a read of stdin can't be cancelled, and the process ends over it.
    std::thread::spawn(move || read_lines(std::io::stdin().lock(), |line| sender.blocking_send(line).is_ok()));
    while let Some(line) = lines.recv().await {
        answer(proxies, line).iter().for_each(|line| console::line(line));
    }
    if !ends {
        std::future::pending::<()>().await;
    }
}

/// Does what a line says, and gives the lines to answer with.
fn answer(proxies: &Proxies, line: Result<String, CommandError>) -> Vec<String> {
    match line.and_then(|line| proxies.obey(&line)) {
        Ok(said) => said,
        Err(error) => vec![format!("ERROR {}", json!({ "error": error.to_string() }))],
    }
}

/// Prints statistics every so often, for ever.
async fn tell(proxies: &Proxies, every: Option<Duration>) {
    let Some(every) = every else { return std::future::pending().await };
    loop {
        tokio::time::sleep(every).await;
        proxies.0.iter().enumerate().for_each(|(at, proxy)| console::line(&stats(at, proxy)));
    }
}

/// Hands on lines that are not empty until the input ends or nobody takes them.
fn read_lines(mut input: impl BufRead, mut take: impl FnMut(Result<String, CommandError>) -> bool) {
    let mut line = Vec::new();
    let mut skipping = false;
    loop {
        line.clear();
        let read = input.by_ref().take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line);
        if !matches!(read, Ok(1..)) {
            return;
        }
        let whole = line.last() == Some(&b'\n') || line.len() < LINE_BYTES_MAX;
        let heard = match (skipping, whole) {
            (false, true) => Ok(String::from_utf8_lossy(&line).trim().to_owned()),
            (false, false) => Err(CommandError::TooLong),
            (true, _) => Ok(String::new()),
        };
        skipping = !whole;
        if !matches!(&heard, Ok(text) if text.is_empty()) && !take(heard) {
            return;
        }
    }
}

fn parse(line: &str) -> Result<Command, CommandError> {
    let unknown = || CommandError::Unknown { line: line.to_owned() };
    let mut words = line.split_whitespace().peekable();
    let proxy = words.peek().and_then(|word| word.parse().ok());
    if proxy.is_some() {
        words.next();
    }
    let verb = words.next().ok_or_else(unknown)?;
    let rest: Vec<&str> = words.collect();
    let action = match (verb, rest.as_slice()) {
        ("set", [_, ..]) => Action::Set(rest.concat()),
        ("cut", ["in"]) => Action::Cut(vec![Way::In]),
        ("cut", ["out"]) => Action::Cut(vec![Way::Out]),
        ("cut", ["both"] | []) => Action::Cut(Way::BOTH.to_vec()),
        ("heal", []) => Action::Heal,
        ("list", []) => Action::List,
        ("stats", []) => Action::Stats,
        _ => return Err(unknown()),
    };
    Ok(Command { proxy, action })
}

/// The proxies, in the order of `--to`.
#[derive(Debug)]
struct Proxies(Vec<ProxyHandle>);

impl Proxies {
    fn start(args: &WanArgs) -> Result<Self, Failure> {
        let count = args.to.len();
        if !args.listen.is_empty() && args.listen.len() != count {
            let why = format!("{} --listen for {count} --to: expected one for each, or none", args.listen.len());
            return Err(Failure::new("config", why));
        }
        if args.set.len() != 1 && args.set.len() != count {
            let why = format!("{} --set for {count} --to: expected one for all, or one for each", args.set.len());
            return Err(Failure::new("config", why));
        }
        let mut proxies = Vec::new();
        for (at, to) in args.to.iter().enumerate() {
            let listen = args.listen.get(at).copied().unwrap_or(SocketAddr::from(([127, 0, 0, 1], 0)));
            let wan = args.set.get(at).or(args.set.first()).cloned().unwrap_or_default();
            let seed = args.seed.wrapping_add(at as u64);
            let settings = ProxySettings { wan, seed, clients_max: args.clients, ..ProxySettings::default() };
            let proxy = Proxy::bind(listen).and_then(|proxy| proxy.start(*to, settings));
            proxies.push(proxy.map_err(Failure::of("listen"))?);
        }
        Ok(Self(proxies))
    }

    /// Does what a line says, and gives the lines to answer with.
    fn obey(&self, line: &str) -> Result<Vec<String>, CommandError> {
        let Command { proxy, action } = parse(line)?;
        let count = self.0.len();
        if let Some(proxy) = proxy.filter(|proxy| *proxy >= count) {
            return Err(CommandError::NoSuchProxy { proxy, count });
        }
        let chosen: Vec<(usize, &ProxyHandle)> =
            self.0.iter().enumerate().filter(|(at, _)| proxy.is_none_or(|proxy| proxy == *at)).collect();
        if let Action::Set(text) = &action {
            // All or none.
            let changed: Result<Vec<_>, _> = chosen.iter().map(|(_, proxy)| proxy.settings().with(text)).collect();
            for ((_, proxy), wan) in chosen.iter().zip(changed?) {
                proxy.set(wan);
            }
        }
        for (_, proxy) in &chosen {
            match &action {
                Action::Set(_) | Action::List => {}
                Action::Cut(ways) => ways.iter().for_each(|way| proxy.cut(*way)),
                Action::Heal => proxy.heal(),
                Action::Stats => return Ok(chosen.iter().map(|(at, proxy)| stats(*at, proxy)).collect()),
            }
        }
        let state: Vec<Value> = chosen.iter().map(|(_, proxy)| describe(proxy)).collect();
        Ok(vec![format!("OK {}", json!({ "proxies": state }))])
    }
}

fn describe(proxy: &ProxyHandle) -> Value {
    json!({
        "listen": proxy.address(),
        "to": proxy.target(),
        "set": proxy.settings().to_string(),
        "cut": proxy.cuts(),
    })
}

fn stats(at: usize, proxy: &ProxyHandle) -> String {
    let mut object = json!(proxy.stats());
    object["proxy"] = json!(at);
    object["set"] = json!(proxy.settings().to_string());
    object["cut"] = json!(proxy.cuts());
    format!("STATS {object}")
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    fn proxies(count: usize) -> Proxies {
        let to = (0..count).map(|_| SocketAddr::from(([127, 0, 0, 1], 9))).collect();
        let set = vec!["rtt=10ms".parse().unwrap()];
        let (listen, stats_every, control) = (Vec::new(), None, None);
        Proxies::start(&WanArgs { listen, to, set, seed: 0, clients: 4, stats_every, control, parent_pipe: false })
            .unwrap()
    }

    #[test]
    fn commands_are_for_one_proxy_or_for_all() {
        let proxies = proxies(2);
        proxies.obey("set loss=1%").unwrap();
        proxies.obey("1 set rtt=40ms, in.rate=1mbit").unwrap();
        proxies.obey("0 cut out").unwrap();
        assert_eq!(proxies.0[0].settings().to_string(), "rtt=10ms,loss=1%");
        assert_eq!(proxies.0[1].settings().to_string(), "rtt=40ms,loss=1%,in.rate=1mbit");
        assert_eq!((proxies.0[0].cuts(), proxies.0[1].cuts()), (vec![Way::Out], vec![]));
        proxies.obey("cut").unwrap();
        assert_eq!(proxies.0[1].cuts(), Way::BOTH);
        let said = proxies.obey("heal").unwrap();
        assert_eq!(proxies.0[0].cuts(), []);
        assert!(said[0].starts_with("OK {\"proxies\":[{"), "{said:?}");
        let said = proxies.obey("stats").unwrap();
        assert_eq!(said.len(), 2);
        let object: Value = serde_json::from_str(said[1].strip_prefix("STATS ").unwrap()).unwrap();
        assert_eq!((&object["proxy"], &object["in"]["entered"]), (&json!(1), &json!(0)));
    }

    #[test]
    fn a_refused_command_changes_nothing() {
        let proxies = proxies(2);
        for line in ["", "2 heal", "heal all", "cut up", "set", "set rtt", "set rtt=1", "0", "-1 heal", "stat"] {
            assert!(proxies.obey(line).is_err(), "{line:?}");
        }
        // Fits the second proxy only.
        proxies.obey("1 set burst=4").unwrap();
        let error = proxies.obey("set loss=60%,burst=1,out.burst=2,out.loss=70%").unwrap_err();
        assert!(error.to_string().contains("out: loss=70%"), "{error}");
        assert_eq!(proxies.0[0].settings().to_string(), "rtt=10ms");
        assert_eq!(proxies.0[1].settings().to_string(), "rtt=10ms,burst=4");
    }

    #[test]
    fn long_lines_are_skipped_whole() {
        let long = "x".repeat(3 * LINE_BYTES_MAX);
        let input = Cursor::new(format!("stats\n\n{long}heal\n  cut in \nheal"));
        let mut heard = Vec::new();
        read_lines(input, |line| {
            heard.push(line.map_err(|error| error.to_string()));
            true
        });
        let too_long = CommandError::TooLong.to_string();
        assert_eq!(heard, [Ok("stats".to_owned()), Err(too_long), Ok("cut in".to_owned()), Ok("heal".to_owned())]);
    }
}
