//! api
pub mod stop;
pub mod text;
