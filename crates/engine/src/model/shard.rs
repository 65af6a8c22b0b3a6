//! The header of one safetensors file, read without trust.
//!
//! Owns [`ShardHeader`]: once made, every tensor in it lies inside the file, overlaps no other and
//! has as many bytes as its type and shape say.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};

use super::error::ModelError;

/// Longest header that is read, in bytes (a real shard's has some hundred thousand).
pub const HEADER_BYTES_MAX: u64 = 64 << 20;

/// Element types that occur in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Dtype {
    /// bf16.
    Bf16,
    /// IEEE single.
    F32,
    /// FP8 with 4 exponent bits, no infinity.
    E4m3,
    /// A power of two.
    E8m0,
    /// Bytes, or two FP4 codes each.
    I8,
    /// Bytes.
    U8,
    /// Ids.
    I32,
    /// Ids.
    I64,
    /// Anything else; the size of an element in bytes.
    Other(u8),
}

impl Dtype {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "BF16" => Self::Bf16,
            "F32" => Self::F32,
            "F8_E4M3" => Self::E4m3,
            "F8_E8M0" => Self::E8m0,
            "I8" => Self::I8,
            "U8" => Self::U8,
            "I32" => Self::I32,
            "I64" => Self::I64,
            "BOOL" | "F8_E5M2" => Self::Other(1),
            "F16" | "I16" | "U16" => Self::Other(2),
            "U32" => Self::Other(4),
            "F64" | "U64" | "C64" => Self::Other(8),
            _ => return None,
        })
    }

    /// Bytes of one element.
    #[must_use]
    pub fn size(self) -> u64 {
        match self {
            Self::E4m3 | Self::E8m0 | Self::I8 | Self::U8 => 1,
            Self::Bf16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::I64 => 8,
            Self::Other(size) => u64::from(size),
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bf16 => f.write_str("BF16"),
            Self::F32 => f.write_str("F32"),
            Self::E4m3 => f.write_str("F8_E4M3"),
            Self::E8m0 => f.write_str("F8_E8M0"),
            Self::I8 => f.write_str("I8"),
            Self::U8 => f.write_str("U8"),
            Self::I32 => f.write_str("I32"),
            Self::I64 => f.write_str("I64"),
            Self::Other(size) => write!(f, "another type of {size} bytes"),
        }
    }
}

/// One tensor of a shard.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Element type.
    pub dtype: Dtype,
    /// Shape, row-major.
    pub shape: Vec<u64>,
    /// Its bytes within the file.
    pub bytes: Range<usize>,
}

/// The tensors of one shard, by the file's own names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShardHeader {
    /// Bytes of the file in front of the data.
    pub header_bytes: u64,
    /// The tensors.
    pub tensors: BTreeMap<String, Entry>,
}

#[derive(Debug, Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The header's object, refusing a name that comes twice.
struct RawHeader(BTreeMap<String, RawEntry>);

impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = RawHeader;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut tensors = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        let entry = map.next_value()?;
                        if tensors.insert(name.clone(), entry).is_some() {
                            return Err(serde::de::Error::custom(format!("tensor {name} comes twice")));
                        }
                    }
                }
                Ok(RawHeader(tensors))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

impl ShardHeader {
    /// Reads the header of a shard's bytes.
    ///
    /// # Errors
    /// [`ModelError`] naming `file`; nothing is allocated by the size of the file's claims.
    pub fn parse(file: &str, bytes: &[u8]) -> Result<Self, ModelError> {
        let total = bytes.len() as u64;
        let truncated =
            |what: String, needed| ModelError::Truncated { file: file.to_owned(), what, needed, got: total };
        let Some((length, rest)) = bytes.split_first_chunk::<8>() else {
            return Err(truncated("the header's length".to_owned(), 8));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_BYTES_MAX {
            return Err(ModelError::HeaderSize { file: file.to_owned(), got: length, limit: HEADER_BYTES_MAX });
        }
        let header_bytes = 8 + length;
        let Some(text) = usize::try_from(length).ok().and_then(|length| rest.get(..length)) else {
            return Err(truncated("the header".to_owned(), header_bytes));
        };
        let header = |why: String| ModelError::Header { file: file.to_owned(), why };
        let raw: RawHeader = serde_json::from_slice(text).map_err(|error| header(error.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (name, entry) in raw.0 {
            let entry = check_entry(&name, &entry, header_bytes).map_err(header)?;
            if entry.bytes.end as u64 > total {
                return Err(truncated(format!("tensor {name}"), entry.bytes.end as u64));
            }
            tensors.insert(name, entry);
        }
        check_overlap(&tensors).map_err(header)?;
        Ok(Self { header_bytes, tensors })
    }
}

fn check_entry(name: &str, raw: &RawEntry, header_bytes: u64) -> Result<Entry, String> {
    let dtype =
        Dtype::parse(&raw.dtype).ok_or_else(|| format!("tensor {name} has the unknown type {:?}", raw.dtype))?;
    let (begin, end) = raw.data_offsets;
    let elements = raw.shape.iter().try_fold(1u64, |product, &size| product.checked_mul(size));
    let Some(expected) = elements.and_then(|elements| elements.checked_mul(dtype.size())) else {
        return Err(format!("tensor {name} of shape {:?} is larger than any memory", raw.shape));
    };
    if end.checked_sub(begin) != Some(expected) {
        return Err(format!(
            "tensor {name} lies at {begin}..{end}, shape {:?} of {dtype} needs {expected} bytes",
            raw.shape
        ));
    }
    let place = |offset: u64| header_bytes.checked_add(offset).and_then(|at| usize::try_from(at).ok());
    match (place(begin), place(end)) {
        (Some(begin), Some(end)) => Ok(Entry { dtype, shape: raw.shape.clone(), bytes: begin..end }),
        _ => Err(format!("tensor {name} ends at {end}, beyond any file")),
    }
}

fn check_overlap(tensors: &BTreeMap<String, Entry>) -> Result<(), String> {
    let mut spans: Vec<_> = tensors.iter().filter(|(_, entry)| !entry.bytes.is_empty()).collect();
    spans.sort_by_key(|(_, entry)| entry.bytes.start);
    for pair in spans.windows(2) {
        let ((first, a), (second, b)) = (pair[0], pair[1]);
        if a.bytes.end > b.bytes.start {
            return Err(format!("tensors {first} at {:?} and {second} at {:?} overlap", a.bytes, b.bytes));
        }
    }
    Ok(())
}
