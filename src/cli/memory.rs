//! Memory that this process can still take: the host's, its control groups' and its own limits.

use std::path::Path;

use rustix::process::{Resource, getrlimit};

/// Bytes that this process can still take: the least of what the host has available and of what
/// each limit leaves. Unlimited where nobody says.
#[must_use]
pub fn free() -> u64 {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let status = read("/proc/self/status");
    let host = kib(&read("/proc/meminfo"), "MemAvailable:").unwrap_or(u64::MAX);
    let left = |resource, used: &str| {
        let limit = getrlimit(resource).current.unwrap_or(u64::MAX);
        limit.saturating_sub(kib(&status, used).unwrap_or(0))
    };
    let groups = in_groups(&read("/proc/self/cgroup"), Path::new("/sys/fs/cgroup"));
    host.min(left(Resource::As, "VmSize:")).min(left(Resource::Data, "VmData:")).min(groups)
}

/// The value in bytes of a line like `MemAvailable:  17 kB`.
fn kib(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1_024)
}

/// What the control groups of a process leave, both versions: `groups` is its list of groups, and
/// below `root` are their files. A group is bound by those above it.
fn in_groups(groups: &str, root: &Path) -> u64 {
    let mut least = u64::MAX;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(group)) = (fields.next(), fields.next()) else { continue };
        let (base, files) = if controllers.is_empty() {
            (root.to_owned(), ["memory.max", "memory.current", "inactive_file"])
        } else if controllers.split(',').any(|name| name == "memory") {
            let files = ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"];
            (root.join("memory"), files)
        } else {
            continue;
        };
        // In a container the list may name a group that is not shown; the root then is its own.
        let folder = base.join(group.trim_start_matches('/'));
        let shown = folder.ancestors().filter(|folder| folder.starts_with(&base));
        least = shown.filter_map(|folder| left_in(folder, files)).fold(least, u64::min);
    }
    least
}

/// What the limit of one group leaves; cached file pages that can be dropped don't count as used.
fn left_in(folder: &Path, [limit, used, cached]: [&str; 3]) -> Option<u64> {
    let read = |file: &str| std::fs::read_to_string(folder.join(file)).ok();
    let number = |file: &str| read(file)?.trim().parse::<u64>().ok();
    let limit = number(limit)?;
    let stat = read("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse::<u64>().ok());
    let used = number(used).unwrap_or(0).saturating_sub(cached.unwrap_or(0));
    Some(limit.saturating_sub(used))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn this_host_says_something() {
        assert!((1..u64::MAX).contains(&free()));
        assert_eq!(kib("MemTotal: 9 kB\nMemAvailable:    17 kB\n", "MemAvailable:"), Some(17 * 1_024));
        assert_eq!(kib("", "MemAvailable:"), None);
    }

    #[test]
    fn the_tightest_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let (outer, inner) = (root.path().join("a"), root.path().join("a/b"));
        fs::create_dir_all(&inner).unwrap();
        let groups = "0::/a/b\n";
        assert_eq!(in_groups(groups, root.path()), u64::MAX, "no limit");
        fs::write(inner.join("memory.max"), "max\n").unwrap();
        fs::write(inner.join("memory.current"), "5\n").unwrap();
        assert_eq!(in_groups(groups, root.path()), u64::MAX, "no limit");
        fs::write(outer.join("memory.max"), "1000\n").unwrap();
        fs::write(outer.join("memory.current"), "400\n").unwrap();
        assert_eq!(in_groups(groups, root.path()), 600);
        fs::write(outer.join("memory.stat"), "anon 1\ninactive_file 100\n").unwrap();
        assert_eq!(in_groups(groups, root.path()), 700);
        fs::write(inner.join("memory.max"), "50\n").unwrap();
        assert_eq!(in_groups(groups, root.path()), 45);
        assert_eq!(in_groups("0::/\n", root.path()), u64::MAX, "not of this group");
    }

    #[test]
    fn groups_of_the_first_version_count_as_well() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("memory");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("memory.limit_in_bytes"), "1000").unwrap();
        fs::write(folder.join("memory.usage_in_bytes"), "300").unwrap();
        let groups = "5:cpu,cpuacct:/x\n4:memory:/not/shown\n";
        assert_eq!(in_groups(groups, root.path()), 700);
        assert_eq!(in_groups("nonsense\n4:memory\n", root.path()), u64::MAX);
    }
}
